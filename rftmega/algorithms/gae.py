"""Generalised advantage estimation (GAE), and discounted returns."""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128  # columns that are computed at a time


def gae(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns), both [B, T] in the dtype of `values`, 0 outside the mask
    (arXiv:1506.02438, eq. 16). `gamma`: discount per token; `lambd`: GAE's lambda.

    values, rewards [B, T] float, mask [B, T] bool or 0/1. Tokens outside the mask are skipped: the
    successor of a token is the next token *of the mask*; after the last one the value is 0. Values
    outside the mask are never read and may be NaN. returns = advantages + values: the target of the
    value model.
    """
    acted = mask.bool()
    surprise = _together(rewards, acted)
    value = _together(values, acted)
    surprise -= value
    surprise[:, :-1] += gamma * value[:, 1:]
    del value
    advantage = _apart(sums_of_later(surprise, gamma * lambd), acted)
    returns = advantage + torch.where(acted, values, 0.0)
    return advantage.to(values.dtype), returns.to(values.dtype)


def discounted_returns(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Returns the discounted return of each token [B, T]: the sum of the rewards [B, T] of this
    token and all later ones, discounted by `gamma` per token.

    Tokens outside the mask do not count as steps of discounting, and get 0.
    """
    found = sums_of_later(_together(reward, mask), gamma)
    return _apart(found, mask).to(reward.dtype)


def sums_of_later(x: Tensor, decay: float) -> Tensor:
    """Returns y [B, T] with y_t = x_t + decay * y_{t + 1}, and 0 after the last one: the sum of x at
    t and later, each with the factor decay^distance. All x must be finite.

    BLOCK columns are computed at a time, so a long row takes few operations.
    """
    blocks = -(-x.shape[1] // BLOCK)
    padded = functional.pad(x, (0, blocks * BLOCK - x.shape[1])).unflatten(1, (blocks, BLOCK))
    column = torch.arange(BLOCK, dtype=x.dtype, device=x.device)
    distance = column - column[:, None]
    within = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0)
    found = padded @ within.T
    to_next = decay ** (BLOCK - column)
    for block in reversed(range(blocks - 1)):
        found[:, block] += found[:, block + 1, :1] * to_next
    return found.flatten(1)[:, : x.shape[1]]


def _together(x: Tensor, mask: Tensor) -> Tensor:
    """Moves the values of each row's mask to the front of the row, in their order, followed by 0;
    in float64.
    """
    place = torch.where(mask, mask.cumsum(1) - 1, x.shape[1])
    found = x.new_zeros(len(x), x.shape[1] + 1, dtype=torch.float64)
    return found.scatter_(1, place, torch.where(mask, x, 0.0).double())[:, :-1]


def _apart(x: Tensor, mask: Tensor) -> Tensor:
    """Moves the values at the front of each row to the places of the mask: the inverse of
    `_together`.
    """
    return torch.where(mask, x.gather(1, (mask.cumsum(1) - 1).clamp(min=0)), 0.0)
