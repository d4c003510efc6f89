"""How far the engine that sampled is from the trainer that learns, and what to do about it."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.types import Metrics


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
    """[tokens of the mask] |engine - trainer|, all [B, T]; infinite where one of them is no number."""
    gap = (behaviour_logp.double() - old_logp.double()).abs()[mask]
    return torch.where(gap.isnan(), torch.inf, gap)


def log_prob_gap(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Gap:
    """Of the response tokens, all [B, T]; all 0, and an error of 1, where there are none."""
    gap = gaps_of(behaviour_logp, old_logp, mask)
    if not len(gap):
        return Gap(0.0, 0.0, 0.0, 0.0, 0, 1.0)
    ranked = gap.sort().values

    def at(share: float) -> float:
        """The smallest gap that at least so many of the tokens do not exceed."""
        return ranked[max(math.ceil(share * len(ranked)) - 1, 0)].item()

    return Gap(at(1.0), at(0.999), gap.mean().item(), at(0.5), len(gap), gap.exp().mean().item())


class Correction(NamedTuple):
    """`kind`: none, token, sequence or mask; `cap` >= 1 bounds the importance weight."""

    kind: str = "none"
    cap: float = 2.0


def importance(old_logp: Tensor, behaviour_logp: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    """[B, T], no gradient: how much a token counts, since the engine drew it and not the trainer (truncated importance sampling,
    https://fengyao.notion.site/off-policy-rl).

    token: trainer's over engine's probability, at most cap. sequence: the product over the answer, at most cap. mask: 1 where the
    token's ratio lies in [1 / cap, cap], else 0.
    """
    return CORRECTIONS[correction.kind](torch.where(mask, old_logp - behaviour_logp, 0.0).detach(), correction.cap)


def _sequence(log_ratio: Tensor, cap: float) -> Tensor:
    return log_ratio.sum(-1, keepdim=True).clamp(max=20.0).exp().clamp(max=cap).expand_as(log_ratio)


def _mask(log_ratio: Tensor, cap: float) -> Tensor:
    ratio = log_ratio.clamp(max=20.0).exp()
    return ((ratio >= 1 / cap) & (ratio <= cap)).to(log_ratio.dtype)


CORRECTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "none": lambda log_ratio, cap: torch.ones_like(log_ratio),
    "token": lambda log_ratio, cap: log_ratio.clamp(max=20.0).exp().clamp(max=cap),
    "sequence": _sequence,
    "mask": _mask,
}
