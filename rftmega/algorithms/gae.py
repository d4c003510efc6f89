"""Generalised advantage estimation (GAE)."""

import torch
from torch import Tensor


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
    value, reward = torch.where(acted, values, 0.0).double(), rewards.double()
    advantage = torch.zeros_like(value)
    later_value = later_advantage = value.new_zeros(len(value))
    for t in reversed(range(value.shape[1])):
        surprise = reward[:, t] + gamma * later_value - value[:, t]
        found = surprise + gamma * lambd * later_advantage
        advantage[:, t] = torch.where(acted[:, t], found, 0.0)
        later_value = torch.where(acted[:, t], value[:, t], later_value)
        later_advantage = torch.where(acted[:, t], found, later_advantage)
    return advantage.to(values.dtype), (advantage + value).to(values.dtype)
