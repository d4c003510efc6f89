"""Learning from given rows, answers or preferences: no rollout, no reward."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from rftmega.algorithms.supervised import last_value
from rftmega.experience import given
from rftmega.interfaces import Callback, Policy, ValueModel
from rftmega.trainer.evaluate import Evaluation, metric_of
from rftmega.types import Experience, LossFn, Metrics, Rows


class Learns(Protocol):
    """A policy or a value model."""

    def update(self, experience: Experience, loss_fn: LossFn, *, group_size: int = 1) -> Metrics: ...


class SupervisedTrainer:
    """One update a batch. `step` counts those that are done."""

    def __init__(
        self,
        *,
        model: Learns,
        loss_fn: LossFn,
        group_size: int = 1,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
    ):
        """`group_size` consecutive rows come before the loss together: 2 for pairs. `stop` as PPOTrainer's."""
        self.model, self.loss_fn, self.group_size = model, loss_fn, group_size
        self.callbacks = callbacks
        self.stop, self.stopped = stop, False
        self.step = 0

    def fit(self, batches: Iterable[Rows], *, steps: int) -> None:
        """Trains until `steps` steps are done, or `stop` says so."""
        start: Metrics = {}
        for callback in self.callbacks:
            callback.on_start(self, start)
        for _, rows in zip(range(self.step, steps), batches, strict=False):  # in this order: draws no batch too many
            begin = time.perf_counter()
            metrics = self.model.update(given(rows), self.loss_fn, group_size=self.group_size)
            self.step += 1
            seconds = time.perf_counter() - begin
            metrics["seconds_update"] = seconds
            for callback in self.callbacks:
                callback.on_phase(self, "update", seconds)
            self.stopped = self.stop()
            for callback in self.callbacks:
                callback.on_step(self, metrics)
            if self.stopped:
                break
        for callback in self.callbacks:
            callback.on_end(self)

    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on after the step of which this is the `state`."""
        self.step = state["step"]


class HeldOut(Evaluation):
    """What the model makes of rows that it does not learn from."""

    def __init__(self, held_out: Mapping[str, Rows], judge: Callable[[Rows], Metrics], *, every: int, last: int):
        super().__init__(held_out, every=every, last=last)
        self.judge = judge

    def evaluate(self, trainer: Any) -> Metrics:
        return {metric_of(name, part): x for name, rows in self.held_out.items() for part, x in self.judge(rows).items()}


def cross_entropy_of(policy: Policy, rows: Rows) -> Metrics:
    """-log p of a response token, on average over all."""
    return {"cross_entropy": -policy.log_probs(rows).logp[rows.mask].double().mean().item()}


def preference_of(model: ValueModel, rows: Rows) -> Metrics:
    """How often (a tie is wrong) and by how much the chosen one of a pair is preferred; `rows` as `pair_rows` gives them."""
    reward = last_value(model.values(rows), rows)
    margin = (reward[0::2] - reward[1::2]).double()
    return {"accuracy": (margin > 0).double().mean().item(), "margin": margin.mean().item()}
