"""Evaluation of a model on given sequences (rows), without generation: responses, or pairs of a
chosen and a rejected response.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rftmega.algorithms.supervised import last_value
from rftmega.core.interfaces import Policy, ValueModel
from rftmega.core.types import Metrics, Rows
from rftmega.monitoring.observers.evaluate import Evaluation, metric_of


class HeldOut(Evaluation):
    """HeldOut is a callback that evaluates the trained model on given sequences (rows) that are not
    trained on. `judge` returns the metrics of one evaluation set's rows, or of its examples if the
    rows are made of them later.
    """

    def __init__(
        self,
        held_out: Mapping[str, Any],
        judge: Callable[[Any], Metrics],
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
    """Returns the metric "cross_entropy": the policy's mean -log p, in nats, over all response
    tokens of `rows`.
    """
    return {"cross_entropy": -policy.log_probs(rows).logp[rows.mask].double().mean().item()}


def preference_of(model: ValueModel, rows: Rows) -> Metrics:
    """Returns the metrics "accuracy", the share of pairs whose chosen response gets the higher
    score (a tie counts as wrong), and "margin", the mean difference of the two scores.

    `model`: the reward model; `rows`: the chosen response of each pair, directly followed by the
    rejected one.
    """
    return _of_scores(last_value(model.values(rows), rows))


def cost_of(model: ValueModel, rows: Rows) -> Metrics:
    """Returns the metrics of `preference_of` for a cost model, whose score is higher for the
    rejected response, and "safety_accuracy", the share of responses whose score is above 0 if and
    only if they are unsafe.
    """
    cost = last_value(model.values(rows), rows)
    assert rows.unsafe is not None, "pairs without safety labels"
    right = ((cost > 0) == rows.unsafe).double().mean().item()
    return {**_of_scores(-cost), "safety_accuracy": right}


def _of_scores(reward: Tensor) -> Metrics:
    margin = (reward[0::2] - reward[1::2]).double()
    return {"accuracy": (margin > 0).double().mean().item(), "margin": margin.mean().item()}
