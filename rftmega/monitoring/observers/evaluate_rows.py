"""HeldOut evaluates on given rows: responses, or pairs of a chosen and a rejected response."""

from collections.abc import Callable, Mapping
from typing import Any

from rftmega.algorithms.supervised import last_value
from rftmega.core.interfaces import Policy, ValueModel
from rftmega.core.types import Metrics, Rows
from rftmega.monitoring.observers.evaluate import Evaluation, metric_of


class HeldOut(Evaluation):
    """HeldOut evaluates the model on rows that it is not trained on."""

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
    """Returns the mean of -log p over all response tokens."""
    return {"cross_entropy": -policy.log_probs(rows).logp[rows.mask].double().mean().item()}


def preference_of(model: ValueModel, rows: Rows) -> Metrics:
    """Returns how often (a tie counts as wrong), and by what margin, the chosen response of a pair
    scores higher.

    `rows` in the order of `pair_rows`.
    """
    reward = last_value(model.values(rows), rows)
    margin = (reward[0::2] - reward[1::2]).double()
    return {"accuracy": (margin > 0).double().mean().item(), "margin": margin.mean().item()}
