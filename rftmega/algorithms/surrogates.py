"""Surrogate objectives of the policy loss per token, before aggregation.

Every surrogate takes log_ratio = logp - old_logp of the sampled tokens, [B, T], through which the
gradient flows, the advantage [B, T] and the mask [B, T]; log_ratio and advantage are 0 outside the
mask. Before the first update (log_ratio = 0) all surrogates have the gradient -advantage.

Those with `needs_log_probs` also take the current log-probs and the engine's, and drop tokens whose
probability has moved too far from the one under which they were sampled.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rftmega.config.options.algorithms import (
    CISPO,
    CPGD,
    DPPO,
    GMPO,
    GSPO,
    IPO,
    SAPO,
    Clip,
    NoPolicyLoss,
    ScoreFunction,
)
from rftmega.config.options.parts import PolicyLoss, implements

LARGEST_LOG_RATIO = 20.0


Surrogate = Callable[..., Tensor]
"""(log_ratio, advantage, mask, options) -> loss, all [B, T]; with `needs_log_probs` also with the
keywords logp and sampling_logp.
"""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Returns the ratio of the current to the old policy's probability, exp(log_ratio), continued
    linearly for log-ratios above LARGEST_LOG_RATIO.

    An infinite ratio would have a gradient of NaN even where a clip applies. A constant ratio would
    have no gradient, and a token of negative advantage that became far more likely would never be
    corrected.
    """
    tangent = math.exp(LARGEST_LOG_RATIO) * (1 + log_ratio - LARGEST_LOG_RATIO)
    return torch.where(
        log_ratio > LARGEST_LOG_RATIO, tangent, log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    )


@implements(Clip)
def clipped(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: Clip) -> Tensor:
    """Returns PPO's clipped loss of each token, [B, T] (arXiv:1707.06347, eq. 7).

    The upper clip range is separate, as in DAPO (arXiv:2503.14476, eq. 10). With `dual` = c > 1 the
    loss of a token with negative advantage is at most -c x advantage (arXiv:1912.09729, eq. 5).
    """
    objective = _pessimistic(log_ratio, advantage, options)
    if options.dual:
        objective = torch.where(
            advantage < 0, torch.maximum(objective, options.dual * advantage), objective
        )
    return -objective


def _pessimistic(log_ratio: Tensor, advantage: Tensor, clip: Clip | GSPO) -> Tensor:
    ratio = ratio_of(log_ratio)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)


@implements(GSPO)
def sequence_clipped(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: GSPO) -> Tensor:
    """Returns GSPO's loss (arXiv:2507.18071, eq. 5), with one clipped ratio per completion, the
    geometric mean of its tokens' ratios.

    Each token of a completion gets the completion's loss; with loss_aggregation=sequence_mean that
    is the paper's objective. Clip ranges are near 1e-3.
    """
    return -_pessimistic(mean_log_ratio(log_ratio, mask), advantage, options)


def mean_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Returns [B, T]: at each token the mean of `log_ratio` [B, T], which is 0 outside `mask`, over
    the tokens of its completion.
    """
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return (log_ratio.sum(-1, keepdim=True) / length).expand_as(log_ratio)


@implements(CISPO)
def weighted_score(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: CISPO) -> Tensor:
    """Returns CISPO's loss (arXiv:2506.13585, eq. 4): -ratio x advantage x log-ratio.

    The ratio is a weight, clipped and without gradient, so the clip cuts off no token's gradient.
    """
    weight = ratio_of(log_ratio.detach()).clamp(1 - options.low, 1 + options.high)
    return -weight * advantage * log_ratio


@implements(CPGD)
def log_clipped(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: CPGD) -> Tensor:
    """Returns CPGD's loss (arXiv:2505.12504, eq. 5 and 7): minus the advantage times the clipped
    log-ratio, plus `drift_coef` x KL(old || current).

    The KL is estimated from the old policy's samples by ratio - 1 - log ratio, which is never
    negative. The estimate's gradient, ratio - 1, is at most `drift_clip`, as in the authors' code:
    beyond that the estimate continues linearly.
    """
    bounded = log_ratio.clamp(math.log1p(-options.low), math.log1p(options.high))
    value = -torch.minimum(log_ratio * advantage, bounded * advantage)
    if options.drift_coef:
        value = value + options.drift_coef * _drift(log_ratio, options.drift_clip)
    return value


def _drift(log_ratio: Tensor, highest: float) -> Tensor:
    """Returns CPGD's drift of each token: ratio - 1 - log ratio, continued linearly above a ratio
    of 1 + `highest`.
    """
    edge = math.log1p(highest)
    near = torch.expm1(log_ratio.clamp(max=edge)) - log_ratio.clamp(max=edge)
    return torch.where(log_ratio > edge, highest - edge + highest * (log_ratio - edge), near)


@implements(ScoreFunction)
def score(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: ScoreFunction) -> Tensor:
    """Returns REINFORCE's loss (Williams, 1992): -advantage x log-ratio, the plain score function.

    It is correct for one optimizer step per rollout phase.
    """
    return -advantage * log_ratio


@implements(SAPO)
def gated(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: SAPO) -> Tensor:
    """Returns SAPO's loss of each token (arXiv:2511.20347, eq. 5 and 6): minus the advantage times
    4 / tau x sigmoid(tau x (ratio - 1)).

    The gate's derivative is 1 at ratio 1 and falls to 0 on both sides, where a clip would cut off.
    """
    tau = torch.where(advantage > 0, options.tau_positive, options.tau_negative)
    return -advantage * 4 / tau * torch.sigmoid(tau * (ratio_of(log_ratio) - 1))


@implements(GMPO)
def geometric_mean(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: GMPO) -> Tensor:
    """Returns GMPO's loss (arXiv:2507.20673, eq. 4): minus the advantage times the geometric mean of
    the completion's clipped ratios.

    Each token of a completion gets the completion's loss; with loss_aggregation=sequence_mean that
    is the paper's objective.
    """
    upper = log_ratio.clamp(max=options.high)
    bounded = torch.where(advantage > 0, upper, log_ratio.clamp(min=-options.low))
    return -advantage * ratio_of(mean_log_ratio(torch.where(mask, bounded, 0.0), mask))


@implements(DPPO)
def in_trust_region(
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    options: DPPO,
    *,
    logp: Tensor,
    sampling_logp: Tensor,
) -> Tensor:
    """Returns DPPO's loss of each token (arXiv:2602.04879, binary total variation): minus ratio x
    advantage, 0 for tokens outside the trust region, plus the drift term of every token.
    """
    left = left_trust_region(options, advantage, logp, sampling_logp)
    return _without(left, log_ratio, advantage, options, logp - sampling_logp)


@implements(IPO)
def in_symmetric_region(
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    options: IPO,
    *,
    logp: Tensor,
    sampling_logp: Tensor,
) -> Tensor:
    """Returns the loss of prime-rl's IPO (`ipo_loss_fn`): as DPPO's, with a trust region that does
    not depend on the advantage.
    """
    left = left_trust_region(options, advantage, logp, sampling_logp)
    return _without(left, log_ratio, advantage, options, logp - sampling_logp)


def _without(
    left: Tensor, log_ratio: Tensor, advantage: Tensor, options: DPPO | IPO, drift: Tensor
) -> Tensor:
    """Returns minus ratio x advantage, 0 where `left`, plus the squared `drift` times its weight."""
    kept = torch.where(left, 0.0, ratio_of(log_ratio) * advantage)
    return options.drift_coef * drift.square() - kept


def left_trust_region(
    options: DPPO | IPO, advantage: Tensor, logp: Tensor, sampling_logp: Tensor
) -> Tensor:
    """Returns [B, T] bool: where a token's probability has moved out of the trust region around its
    probability under the sampling policy. DPPO's has a bound in the direction of the advantage
    only, and for an advantage of 0 the lower one.
    """
    moved = logp.detach().exp() - sampling_logp.exp()
    if isinstance(options, IPO):
        return moved.abs() > options.threshold
    return torch.where(advantage > 0, moved > options.high, moved < -options.low)


@implements(NoPolicyLoss)
def none(log_ratio: Tensor, advantage: Tensor, mask: Tensor, options: NoPolicyLoss) -> Tensor:
    """Returns zeros, [B, T]."""
    return torch.zeros_like(log_ratio)


def clip_binds(
    options: PolicyLoss,
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    logp: Tensor | None = None,
    sampling_logp: Tensor | None = None,
) -> Tensor | None:
    """Returns [B, T] bool: where the clip of a policy loss cuts the gradient off (cispo: bounds the
    weight; dppo and ipo: the token is dropped); None for a loss without clip.

    The clip on a ratio binds in the direction of the advantage: above if the advantage is positive,
    below if it is negative, where `dual` binds as well. For gspo all tokens of a completion have
    the same value.
    """
    if isinstance(options, DPPO | IPO):
        assert logp is not None
        assert sampling_logp is not None
        return left_trust_region(options, advantage, logp, sampling_logp) & mask
    if not isinstance(options, Clip | GSPO | GMPO | CISPO | CPGD):
        return None
    if isinstance(options, GSPO):
        log_ratio = mean_log_ratio(log_ratio, mask)
    low, high = bounds_of(options)
    above, below = log_ratio > high, log_ratio < low
    if isinstance(options, CISPO):
        return above | below
    binds = (above & (advantage > 0)) | (below & (advantage < 0))
    if isinstance(options, Clip) and options.dual:
        binds = binds | ((log_ratio > math.log(options.dual)) & (advantage < 0))
    return binds


def bounds_of(options: Clip | GSPO | GMPO | CISPO | CPGD) -> tuple[float, float]:
    """Returns the log-ratios below and above which a clip applies."""
    if isinstance(options, GMPO):
        return -options.low, options.high
    return math.log1p(-options.low) if options.low < 1 else -math.inf, math.log1p(options.high)
