"""Log-prob mismatch between rollout engine and trainer, and its correction by importance sampling."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.config.options.algorithms import (
    IcePop,
    MaskedImportance,
    NoImportance,
    SequenceImportance,
    TokenImportance,
)
from rftmega.config.options.parts import IMPLEMENTATIONS, ImportanceSampling, implements
from rftmega.core.ragged import Ragged, by_rows
from rftmega.core.types import Experience, Metrics


class Gap(NamedTuple):
    """Statistics of the log-prob mismatch between rollout engine and trainer, |engine - trainer|,
    over tokens.
    """

    largest: float
    percentile: float  # the 99.9th
    mean: float
    median: float
    tokens: int
    error: float  # mean of exp(gap): the factor by which probabilities differ

    @property
    def metrics(self) -> Metrics:
        return {
            "logprob_gap_max": self.largest,
            "logprob_gap_p999": self.percentile,
            "logprob_gap_mean": self.mean,
            "token_mult_prob_error": self.error,
        }


def gaps_of(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Returns the log-prob mismatch |`behaviour_logp` (rollout engine) - `old_logp` (trainer)| of
    each token of the mask, [tokens] float64; all inputs have the same shape.

    The mismatch is infinite if one of the log-probs is NaN.
    """
    gap = (behaviour_logp[mask].double() - old_logp[mask]).abs_()
    return gap.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def log_prob_gap(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Gap:
    """Returns statistics of the log-prob mismatch |`behaviour_logp` (rollout engine) - `old_logp`
    (trainer)| over the tokens of the mask; all inputs have the same shape.

    Without tokens all statistics are 0, except the error, which is 1.
    """
    gap = gaps_of(behaviour_logp, old_logp, mask)
    if not len(gap):
        return Gap(0.0, 0.0, 0.0, 0.0, 0, 1.0)

    def at(share: float) -> float:
        """Returns the `share` quantile: the smallest mismatch that at least this share of the
        tokens does not exceed.
        """
        return gap.kthvalue(max(math.ceil(share * len(gap)), 1)).values.item()

    return Gap(
        gap.max().item(), at(0.999), gap.mean().item(), at(0.5), len(gap), gap.exp().mean().item()
    )


def importance(
    old_logp: Tensor, behaviour_logp: Tensor, mask: Tensor, options: ImportanceSampling
) -> Tensor:
    """Returns the importance weight of each token, [B, T], without gradient. It corrects for
    sampling from the rollout engine, with log-probs `behaviour_logp`, instead of the trainer, with
    log-probs `old_logp` (truncated importance sampling, https://fengyao.notion.site/off-policy-rl).
    The class of `options` selects the kind of weights.
    """
    weights: Tensor = IMPLEMENTATIONS[type(options)](
        torch.where(mask, old_logp - behaviour_logp, 0.0).detach(), options
    )
    return weights


def effective_share(
    old_logp: Ragged, behaviour_logp: Ragged, mask: Ragged, options: ImportanceSampling
) -> float:
    """Returns the effective sample size of the importance weights w as a share of the tokens: (sum
    w)^2 / (n sum w^2), 1 if all weights are equal (Kong 1992).

    The weights are those of the loss, after cap and mask. n counts all tokens of the mask,
    including tokens that a correction drops (weight 0). With SequenceImportance, whose weight is
    the same for all tokens of a row, n counts rows instead. Returns 0 if all weights are 0.
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
    """Returns a function that computes `effective_share`, the effective sample size as a share of
    the tokens, from an Experience; None if no importance correction is configured.
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
    """Returns weight 1 for every token, [B, T]: no correction."""
    return torch.ones_like(log_ratio)


@implements(TokenImportance)
def token_weights(log_ratio: Tensor, options: TokenImportance) -> Tensor:
    """Returns [B, T]: each token's ratio of the trainer's to the engine's probability,
    exp(`log_ratio`), at most `options.cap`.
    """
    return log_ratio.clamp(max=20.0).exp().clamp(max=options.cap)


@implements(SequenceImportance)
def sequence_weights(log_ratio: Tensor, options: SequenceImportance) -> Tensor:
    """Returns [B, T]: at each token the product of the ratios of the trainer's to the engine's
    probability over its completion, at most `options.cap`. `log_ratio` [B, T]: the logarithm of
    each token's ratio, 0 outside the mask.
    """
    return (
        log_ratio.sum(-1, keepdim=True)
        .clamp(max=20.0)
        .exp()
        .clamp(max=options.cap)
        .expand_as(log_ratio)
    )


@implements(MaskedImportance)
def token_mask(log_ratio: Tensor, options: MaskedImportance) -> Tensor:
    """Returns [B, T]: 1 where a token's ratio of the trainer's to the engine's probability,
    exp(`log_ratio`), lies in [1 / cap, cap] with `options.cap`, else 0.
    """
    ratio = log_ratio.clamp(max=20.0).exp()
    return ((ratio >= 1 / options.cap) & (ratio <= options.cap)).to(log_ratio.dtype)


@implements(IcePop)
def token_window(log_ratio: Tensor, options: IcePop) -> Tensor:
    """Returns [B, T]: each token's ratio of the trainer's to the engine's probability,
    exp(`log_ratio`), where it lies in [low, high], else 0 (arXiv:2510.18855, section 2.3.2).
    """
    ratio = log_ratio.clamp(max=20.0).exp()
    return torch.where((ratio >= options.low) & (ratio <= options.high), ratio, 0.0)
