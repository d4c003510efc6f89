"""Training of a policy on preference data, and its evaluation, without rollouts or rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rftmega.core.interfaces import Scorer
from rftmega.core.types import Experience, LossFn, Metrics, Preferences, Rows, TokenMetric
from rftmega.trainer.experience import given
from rftmega.trainer.loop import Trainer
from rftmega.trainer.optimizer_steps import Schedule, merged
from rftmega.trainer.supervised import Learns

Collate = Callable[[Sequence[Any]], Preferences]


class PreferenceTrainer(Trainer):
    """PreferenceTrainer trains a policy on one batch of preference data per step. A batch is a list
    of examples.
    """

    def __init__(
        self,
        *,
        model: Learns,
        policy: Scorer,
        collate: Collate,
        loss_fn: LossFn,
        group_size: int,
        schedule: Schedule,
        stop: Callable[[], bool] = lambda: False,
    ):
        """`policy`: computes the log-probs of `model`; `collate`: makes rows of examples;
        `group_size`: number of consecutive rows that are passed to the loss together, 2 for pairs.

        `stop`: see Trainer.
        """
        super().__init__(stop=stop)
        self.model, self.policy, self.collate = model, policy, collate
        self.loss_fn, self.group_size, self.schedule = loss_fn, group_size, schedule

    def train_step(self, batch: Sequence[Any]) -> Metrics:
        rows, mismatched = self.collate(batch)
        experience = given(rows)
        with self.phase("update"):
            units = torch.full((len(rows) // self.group_size,), self.group_size)
            steps = []
            for index in self.schedule.mini_batches(units, self.step):
                own = experience.select(index)
                if mismatched is not None:
                    own = with_baseline(own, self.policy, mismatched.select(index))
                steps.append(self.model.step(own, self.loss_fn, group_size=self.group_size))
        self.step += 1
        return merged(steps)


def with_baseline(experience: Experience, policy: Scorer, mismatched: Rows) -> Experience:
    """Returns the experience with KTO's baseline z0 (arXiv:2402.01306, section 4): the mean
    log-ratio of policy and reference on responses to other prompts, but at least 0.

    It is one number for all rows of an optimizer step, computed before the step, so it depends
    neither on micro-batches nor on the layout; it has no gradient.
    """
    assert mismatched.reference_sum is not None, "the reference has scored no mismatched responses"
    ratios = sums_of(policy, mismatched) - mismatched.reference_sum
    baseline = ratios.mean().clamp(min=0)
    return replace(experience, kl_baseline=baseline.expand(len(experience)))


def sums_of(policy: Scorer, rows: Rows) -> Tensor:
    """Returns [B] float64: the log-prob of each row's response at temperature 1."""
    logp = policy.log_probs(rows, temperature=1.0).logp
    return torch.where(rows.mask, logp, 0.0).double().sum(-1)


def evaluated(policy: Scorer, loss_fn: LossFn, data: Preferences) -> Metrics:
    """Returns "loss" and the metrics of `loss_fn` on the rows of `data`, without training on them."""
    rows, mismatched = data
    experience = given(rows)
    if mismatched is not None:
        experience = with_baseline(experience, policy, mismatched)
    loss = loss_fn(policy.log_probs(rows, temperature=1.0), experience)
    whole = TokenMetric(loss.value, loss.weight, loss.count)
    return {name: _mean(metric) for name, metric in (loss.metrics | {"loss": whole}).items()}


def _mean(metric: TokenMetric) -> float:
    total = (metric.value.double() * metric.weight).sum()
    return float(total) / max(int(metric.count), 1)
