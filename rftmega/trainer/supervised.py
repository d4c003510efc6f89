"""Learning from given rows, answers or preferences: no rollout, no reward."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rftmega.algorithms.supervised import last_value
from rftmega.experience import given
from rftmega.interfaces import Policy, ValueModel
from rftmega.trainer.evaluate import Evaluation, metric_of
from rftmega.trainer.loop import Trainer
from rftmega.trainer.optimizer_steps import Schedule, take_steps
from rftmega.types import Experience, LossFn, Metrics, Rows


class Learns(Protocol):
    """A policy or a value model."""

    def step(self, experience: Experience, loss_fn: LossFn, *, group_size: int = 1) -> Metrics: ...


class SupervisedTrainer(Trainer):
    """One update a batch."""

    def __init__(
        self,
        *,
        model: Learns,
        loss_fn: LossFn,
        group_size: int = 1,
        schedule: Schedule | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        """`group_size` consecutive rows come before the loss together: 2 for pairs.

        `stop` as Trainer's.
        """
        super().__init__(stop=stop)
        self.model, self.loss_fn, self.group_size = model, loss_fn, group_size
        self.schedule = schedule or Schedule()

    def train_step(self, batch: Rows) -> Metrics:
        experience = given(batch)
        with self.phase("update"):
            rows = self.schedule.mini_batches(len(experience), self.step, self.group_size)
            metrics = take_steps(
                self.model, experience, self.loss_fn, rows, group_size=self.group_size
            )
        self.step += 1
        return metrics


class HeldOut(Evaluation):
    """HeldOut judges the model on rows that it does not learn from."""

    def __init__(
        self,
        held_out: Mapping[str, Rows],
        judge: Callable[[Rows], Metrics],
        *,
        every: int,
        last: int,
    ):
        super().__init__(held_out, every=every, last=last)
        self.judge = judge

    def evaluate(self, trainer: Any) -> Metrics:
        return {
            metric_of(name, part): x
            for name, rows in self.held_out.items()
            for part, x in self.judge(rows).items()
        }


def cross_entropy_of(policy: Policy, rows: Rows) -> Metrics:
    """-log p of a response token, on average over all."""
    return {"cross_entropy": -policy.log_probs(rows).logp[rows.mask].double().mean().item()}


def preference_of(model: ValueModel, rows: Rows) -> Metrics:
    """Returns how often (a tie is wrong), and by how much, a pair's chosen one is preferred; `rows`
    as `pair_rows` gives them.
    """
    reward = last_value(model.values(rows), rows)
    margin = (reward[0::2] - reward[1::2]).double()
    return {"accuracy": (margin > 0).double().mean().item(), "margin": margin.mean().item()}
