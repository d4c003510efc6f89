"""What a policy-gradient step minimises per token, before it is averaged: the one part in which the members of the family differ.

Every surrogate takes log_ratio = logp - old_logp of the sampled tokens, [B, T], which carries the gradient, the advantage [B, T]
and the mask [B, T]; both are 0 outside it. Where nothing has changed yet (log_ratio = 0) all have the gradient -advantage.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0


class Clip(NamedTuple):
    """How far a step may go: ratios from 1 - low to 1 + high; `dual` bounds the loss where the advantage is negative (0: does
    not); `drift` weighs CPGD's KL to the old policy, whose gradient grows no further above a ratio of 1 + drift_high.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0
    drift: float = 0.0
    drift_high: float = 0.2


Surrogate = Callable[[Tensor, Tensor, Tensor, Clip], Tensor]


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp, and beyond LARGEST_LOG_RATIO its tangent there.

    inf would have a gradient of NaN even where a clip takes over. A constant would have none, and a token of negative advantage
    that became far more likely would never be unlearnt.
    """
    tangent = math.exp(LARGEST_LOG_RATIO) * (1 + log_ratio - LARGEST_LOG_RATIO)
    return torch.where(log_ratio > LARGEST_LOG_RATIO, tangent, log_ratio.clamp(max=LARGEST_LOG_RATIO).exp())


def clipped(log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip: Clip) -> Tensor:
    """PPO's pessimistic bound (arXiv:1707.06347, eq. 7), with a clip range of its own upwards (DAPO, arXiv:2503.14476, eq. 10).

    With `dual` = c > 1 the loss of a token with negative advantage is at most -c x advantage (arXiv:1912.09729, eq. 5).
    """
    ratio = ratio_of(log_ratio)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    if clip.dual:
        objective = torch.where(advantage < 0, torch.maximum(objective, clip.dual * advantage), objective)
    return -objective


def sequence_clipped(log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip: Clip) -> Tensor:
    """GSPO (arXiv:2507.18071, eq. 5): one ratio an answer, the geometric mean of its tokens'; the clip is on that.

    Given to each of its tokens; with the weighting sequence_mean that is the paper's objective. Clip ranges are near 1e-3.
    """
    return clipped(mean_log_ratio(log_ratio, mask), advantage, mask, clip)


def mean_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: the mean over the answer, at each of its tokens."""
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return (log_ratio.sum(-1, keepdim=True) / length).expand_as(log_ratio)


def weighted_score(log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip: Clip) -> Tensor:
    """CISPO (arXiv:2506.13585, eq. 4): no token's gradient is cut off; its weight, the ratio, is clipped and held constant."""
    weight = ratio_of(log_ratio.detach()).clamp(1 - clip.low, 1 + clip.high)
    return -weight * advantage * log_ratio


def log_clipped(log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip: Clip) -> Tensor:
    """CPGD (arXiv:2505.12504, eq. 5 and 7): no ratio multiplies the advantage; the clip is on its logarithm.

    Plus `drift` x KL(old || present), estimated from the old policy's samples by ratio - 1 - log ratio, which is never negative.
    Its gradient, ratio - 1, is at most `drift_high`, as in the authors' code: from there on the estimate is its own tangent.
    """
    bounded = log_ratio.clamp(math.log1p(-clip.low), math.log1p(clip.high))
    value = -torch.minimum(log_ratio * advantage, bounded * advantage)
    if clip.drift:
        value = value + clip.drift * _drift(log_ratio, clip.drift_high)
    return value


def _drift(log_ratio: Tensor, highest: float) -> Tensor:
    """ratio - 1 - log ratio, and its tangent from a ratio of 1 + `highest` on."""
    edge = math.log1p(highest)
    near = torch.expm1(log_ratio.clamp(max=edge)) - log_ratio.clamp(max=edge)
    return torch.where(log_ratio > edge, highest - edge + highest * (log_ratio - edge), near)


def score(log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip: Clip) -> Tensor:
    """REINFORCE (Williams, 1992): the plain score function; right for one optimizer step a rollout."""
    return -advantage * log_ratio


SURROGATES: dict[str, Surrogate] = {
    "ppo": clipped,
    "gspo": sequence_clipped,
    "cispo": weighted_score,
    "cpgd": log_clipped,
    "reinforce": score,
}


def clip_binds(name: str, log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip: Clip) -> Tensor | None:
    """[B, T] bool: where the clip of SURROGATES[name] cuts the gradient off (cispo: bounds the weight); None where it has none.

    The clip on a ratio binds on the side that the advantage pushes to: above where it is positive, below where it is negative;
    there `dual` binds as well. For gspo all tokens of an answer are alike.
    """
    if name == "reinforce":
        return None
    if name == "gspo":
        log_ratio = mean_log_ratio(log_ratio, mask)
    above = log_ratio > math.log1p(clip.high)
    below = log_ratio < math.log1p(-clip.low) if clip.low < 1 else torch.zeros_like(above)
    if name == "cispo":
        return above | below
    binds = (above & (advantage > 0)) | (below & (advantage < 0))
    if clip.dual:
        binds = binds | ((log_ratio > math.log(clip.dual)) & (advantage < 0))
    return binds
