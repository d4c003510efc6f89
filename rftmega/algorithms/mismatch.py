"""How far the engine that sampled is from the trainer that learns, and what to do about it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.types import Metrics


def log_prob_gap(behaviour_logp: Tensor, old_logp: Tensor, mask: Tensor) -> Metrics:
    """|engine - trainer| log-probability over response tokens (all [B, T]), largest and mean, and the mean of its exp, by which
    factor probabilities differ. 0, 0 and 1 where there are no tokens.
    """
    gap = (behaviour_logp - old_logp).abs()[mask]
    if not len(gap):
        return {"logprob_gap_max": 0.0, "logprob_gap_mean": 0.0, "token_mult_prob_error": 1.0}
    return {
        "logprob_gap_max": gap.max().item(),
        "logprob_gap_mean": gap.mean().item(),
        "token_mult_prob_error": gap.double().exp().mean().item(),
    }


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
