"""Per-token objectives to minimise. No reduction: a `TokenLoss` carries value, weight and count."""

import torch
from torch import Tensor

from rftmega.algorithms.kl import ESTIMATORS
from rftmega.algorithms.weighting import Weighting, token_mean
from rftmega.types import Experience, LossFn, TokenLoss, TokenStats

LARGEST_LOG_RATIO = 20.0


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """PPO's pessimistic bound (arXiv:1707.06347, eq. 7), with a clip range of its own upwards (DAPO, eq. 10)."""
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()  # inf has a gradient of NaN even where the clip takes over
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def policy_loss(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    weighting: Weighting = token_mean,
) -> LossFn:
    """Clipped surrogate + kl_coef x KL to the reference - entropy_coef x entropy, per token."""
    kl = ESTIMATORS[kl_estimator]

    def loss(stats: TokenStats, experience: Experience) -> TokenLoss:
        mask = experience.mask
        # Masked before exp: a padding column may hold anything, and inf * 0 is NaN.
        log_ratio = torch.where(mask, stats.logp - experience.old_logp, 0.0)
        advantage = torch.where(mask, experience.advantage, 0.0)
        value = clipped_surrogate(log_ratio, advantage, low=clip_low, high=clip_high)
        ratio = log_ratio.detach().clamp(max=LARGEST_LOG_RATIO).exp()
        metrics = {
            "policy_loss": value.detach(),
            "ratio": ratio,
            "clip_fraction": ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float(),
            "ppo_kl": -log_ratio.detach(),
        }
        if experience.reference_logp is not None:
            delta = torch.where(mask, stats.logp - experience.reference_logp, 0.0)
            metrics["kl"] = kl(delta.detach())
            if kl_coef:
                value = value + kl_coef * kl(delta)
        if stats.entropy is not None:
            entropy = torch.where(mask, stats.entropy, 0.0)
            metrics["entropy"] = entropy.detach()
            if entropy_coef:
                value = value - entropy_coef * entropy
        weight, count = weighting(mask)
        return TokenLoss(value, weight, count, metrics)

    return loss
