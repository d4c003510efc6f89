"""Critic losses per token, without reduction: a `TokenLoss` holds value, weight and count."""

import torch
from torch.nn import functional as F

from rftmega.algorithms.aggregation import Aggregation, averaged, token_mean
from rftmega.core.types import Experience, LossFn, TokenLoss, TokenValues


def value_loss(
    *, clip: float = 0.0, huber: float = 0.0, aggregation: Aggregation = token_mean
) -> LossFn:
    """Returns the critic's loss function: half the squared difference between value and return of
    each token, [B, T], with the token weights of `aggregation`.

    With `clip` above 0, the larger of this loss and the loss of the value clipped to within `clip`
    of the value at scoring time (arXiv:2005.12729, section 3). With `huber` above 0, the Huber
    loss, which is linear for differences above `huber`.
    """

    def distance(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if huber:
            return F.huber_loss(value, target, reduction="none", delta=huber)
        return (value - target).square() / 2

    def loss(stats: TokenValues, experience: Experience) -> TokenLoss:
        mask = experience.mask
        assert experience.old_value is not None and experience.returns is not None, (
            "scored without a critic"
        )
        value = torch.where(mask, stats.value, 0.0)
        old, target = (
            torch.where(mask, x, 0.0) for x in (experience.old_value, experience.returns)
        )
        found = distance(value, target)
        moved = (value - old).detach()
        if clip:
            found = torch.maximum(found, distance(old + (value - old).clamp(-clip, clip), target))
        clipped = (moved.abs() > clip).float() if clip else torch.zeros_like(moved)
        metrics = averaged({"value_loss": found}, mask, aggregation, experience.shares)
        metrics |= averaged({"value": value, "value_clip_fraction": clipped}, mask)
        weight, count = aggregation(mask, experience.shares)
        return TokenLoss(found, weight, count, metrics)

    return loss
