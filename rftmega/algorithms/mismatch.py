"""Distance of the engine that sampled from the trainer that learns, and its correction."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.config.options.algorithms import (
    MaskedImportance,
    NoImportance,
    SequenceImportance,
    TokenImportance,
)
from rftmega.config.options.parts import IMPLEMENTATIONS, ImportanceSampling, implements
from rftmega.core.ragged import Ragged, by_rows
from rftmega.core.types import Experience, Metrics


class Gap(NamedTuple):
    """|engine - trainer| log-probability over tokens."""

    largest: float
    percentile: float  # the 99.9th
    mean: float
    median: float
    tokens: int
    error: float  # mean of exp(gap): by which factor probabilities differ

    @property
    def metrics(self) -> Metrics:
        return {
            "logprob_gap_max": self.largest,
            "logprob_gap_p999": self.percentile,
            "logprob_gap_mean": self.mean,
            "token_mult_prob_error": self.error,
        }


def gaps_of(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Returns [tokens of the mask] |engine - trainer|, all of one shape.

    Infinite where one of them is no number.
    """
    gap = (behaviour_logp[mask].double() - old_logp[mask]).abs_()
    return gap.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def log_prob_gap(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Gap:
    """Returns the gap of the response tokens, all of one shape.

    All 0, and an error of 1, where there are none.
    """
    gap = gaps_of(behaviour_logp, old_logp, mask)
    if not len(gap):
        return Gap(0.0, 0.0, 0.0, 0.0, 0, 1.0)

    def at(share: float) -> float:
        """Returns the smallest gap that at least so many of the tokens do not exceed."""
        return gap.kthvalue(max(math.ceil(share * len(gap)), 1)).values.item()

    return Gap(
        gap.max().item(), at(0.999), gap.mean().item(), at(0.5), len(gap), gap.exp().mean().item()
    )


def importance(
    old_logp: Tensor, behaviour_logp: Tensor, mask: Tensor, options: ImportanceSampling
) -> Tensor:
    """Returns [B, T], no gradient: how much a token counts, since the engine drew it and not the
    trainer (truncated importance sampling, https://fengyao.notion.site/off-policy-rl).
    """
    weights: Tensor = IMPLEMENTATIONS[type(options)](
        torch.where(mask, old_logp - behaviour_logp, 0.0).detach(), options
    )
    return weights


def effective_share(
    old_logp: Ragged, behaviour_logp: Ragged, mask: Ragged, options: ImportanceSampling
) -> float:
    """Returns the effective sample size of the weights as a share of the tokens: (sum w)^2 / (n sum
    w^2), 1 where all weigh the same (Kong 1992).

    Weights are those that the loss multiplies with, after cap and mask. n counts all tokens of the
    mask, those that a correction drops (weight 0) among them. Of `sequence`, whose weight all
    tokens of a row share, rows are counted instead. 0 where nothing has a weight.
    """
    weights = by_rows(importance, old_logp, behaviour_logp, mask, options)
    if isinstance(options, SequenceImportance):
        trained = [row[own][:1] for row, own in zip(weights, mask, strict=True)]
        chosen = torch.cat(trained).double() if trained else torch.zeros(0)
    else:
        chosen = weights.flat[mask.flat].double()
    squares = len(chosen) * chosen.square().sum().item()
    return chosen.sum().item() ** 2 / squares if squares else 0.0


def effectiveness_of(
    options: ImportanceSampling,
) -> Callable[[Experience[Ragged]], float] | None:
    """Returns what measures the weights of a rollout (`effective_share`); None where nothing is
    corrected.
    """
    if isinstance(options, NoImportance):
        return None

    def effective(experience: Experience[Ragged]) -> float:
        assert experience.old_logp is not None
        return effective_share(
            experience.old_logp, experience.behaviour_logp, experience.mask, options
        )

    return effective


@implements(NoImportance)
def no_weights(log_ratio: Tensor, options: NoImportance) -> Tensor:
    """Returns 1 for every token."""
    return torch.ones_like(log_ratio)


@implements(TokenImportance)
def token_weights(log_ratio: Tensor, options: TokenImportance) -> Tensor:
    """Returns the trainer's over the engine's probability, at most `cap`."""
    return log_ratio.clamp(max=20.0).exp().clamp(max=options.cap)


@implements(SequenceImportance)
def sequence_weights(log_ratio: Tensor, options: SequenceImportance) -> Tensor:
    """Returns the product of the ratios over the answer, at most `cap`, for each of its tokens."""
    return (
        log_ratio.sum(-1, keepdim=True)
        .clamp(max=20.0)
        .exp()
        .clamp(max=options.cap)
        .expand_as(log_ratio)
    )


@implements(MaskedImportance)
def token_mask(log_ratio: Tensor, options: MaskedImportance) -> Tensor:
    """Returns 1 where a token's ratio lies in [1 / cap, cap], else 0."""
    ratio = log_ratio.clamp(max=20.0).exp()
    return ((ratio >= 1 / options.cap) & (ratio <= options.cap)).to(log_ratio.dtype)
