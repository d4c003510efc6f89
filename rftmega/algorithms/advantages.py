"""Rewards in, advantages out. Every function sees the whole batch, so a group never straddles processes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.algorithms.filters import clip_filter_weight
from rftmega.algorithms.gae import gae
from rftmega.algorithms.groups import varied


def group_normalised(reward: Tensor, group: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """How much better than its siblings was each answer? (GRPO, arXiv:2402.03300, section 4.1.2)

    reward [B], group [B] int -> [B]: reward minus the group's mean, over its unbiased standard deviation. A group that
    agrees, and a group of one, teaches nothing: exactly 0. `scale_by_std=False` is Dr. GRPO (arXiv:2503.20783).
    """
    centred, index, size = _centred(reward, group)
    if scale_by_std:
        variance = torch.zeros_like(size).index_add(0, index, centred**2) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[index] + eps)
    return centred.to(reward.dtype)


def leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    """reward [B], group [B] int -> [B]: reward minus the mean of the group's others, 0 where there are none.

    RLOO, arXiv:2402.14740, eq. 8.
    """
    centred, index, size = _centred(reward, group)
    others = (size - 1).clamp(min=1)
    return (centred * (size / others)[index]).to(reward.dtype)


def _centred(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(reward minus its group's mean [B], number of each row's group [B], sizes of the groups), in float64: in float32 three
    rewards of 0.1 do not have the mean 0.1, and the residue over eps is a signal.
    """
    exact = reward.double()
    _, index = group.unique(return_inverse=True)
    size = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(0, index, torch.ones_like(exact))
    mean = torch.zeros_like(size).index_add(0, index, exact) / size
    return torch.where(varied(exact, group), exact - mean[index], 0.0), index, size


def token_rewards(reward: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """[B, T]: the answer's reward [B] at its last token, minus `penalty` [B, T] at every token; 0 outside the mask."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(-1, keepdim=True)
    placed = torch.where(mask & (columns == last), reward[:, None], torch.zeros((), dtype=reward.dtype))
    return placed if penalty is None else placed - torch.where(mask, penalty, 0.0)


def discounted_returns(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """reward [B, T] -> [B, T]: what follows from each token on, discounted a token; holes in the mask take no step."""
    found = torch.zeros_like(reward)
    running = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        running = torch.where(mask[:, t], reward[:, t] + gamma * running, running)
        found[:, t] = torch.where(mask[:, t], running, 0.0)
    return found


def whitened(advantage: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """[B, T] with mean 0 and variance 1 over all tokens of the mask, 0 outside; what does not vary becomes 0."""
    kept = advantage[mask].double()
    if not len(kept) or kept.min() == kept.max():
        return torch.zeros_like(advantage)
    scaled = (advantage.double() - kept.mean()) / (kept.var(correction=0) + eps).sqrt()
    return torch.where(mask, scaled, 0.0).to(advantage.dtype)


class Scored(NamedTuple):
    """What an estimator may look at."""

    reward: Tensor  # [B]
    group: Tensor  # [B] int64
    mask: Tensor  # [B, T]
    value: Tensor | None  # [B, T] of the critic; None where there is none
    penalty: Tensor | None  # [B, T], the KL's share of each token's reward; None where it is in the loss
    gamma: float
    lam: float
    scale_by_std: bool
    clip_filter_weight: float = 0.0  # largest factor that makes up for groups that agree; 0: no factor


Estimator = Callable[[Scored], Tensor]


def _group(scored: Scored) -> Tensor:
    advantage = group_normalised(scored.reward, scored.group, scale_by_std=scored.scale_by_std)
    if scored.clip_filter_weight:
        advantage = advantage * clip_filter_weight(scored.reward, scored.group, most=scored.clip_filter_weight)
    return advantage[:, None] * scored.mask


def _leave_one_out(scored: Scored) -> Tensor:
    """An answer is one action, so the KL of all its tokens is taken off its reward before the others' mean is."""
    reward = scored.reward
    if scored.penalty is not None:
        reward = reward - torch.where(scored.mask, scored.penalty, 0.0).sum(-1)
    return leave_one_out(reward, scored.group)[:, None] * scored.mask


def _reinforce(scored: Scored) -> Tensor:
    return discounted_returns(token_rewards(scored.reward, scored.mask, scored.penalty), scored.mask, scored.gamma)


def _gae(scored: Scored) -> Tensor:
    assert scored.value is not None, "advantage=gae needs a critic"
    rewards = token_rewards(scored.reward, scored.mask, scored.penalty)
    return gae(scored.value, rewards, scored.mask, scored.gamma, scored.lam)[0]


ESTIMATORS: dict[str, Estimator] = {
    "group": _group,  # GRPO
    "leave_one_out": _leave_one_out,  # RLOO
    "reinforce": _reinforce,  # REINFORCE++ (arXiv:2501.03262), whitened
    "gae": _gae,  # PPO with a critic
}
