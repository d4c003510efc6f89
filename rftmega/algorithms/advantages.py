"""Rewards in, advantages out.

Every estimator sees the whole batch, so a group never straddles processes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.algorithms.filters import clip_filter_weight
from rftmega.algorithms.gae import gae
from rftmega.algorithms.groups import varied
from rftmega.config.algorithms import GAE, GroupNorm, LeaveOneOut, Returns
from rftmega.config.parts import IMPLEMENTATIONS, Advantage, implements
from rftmega.ragged import Ragged, by_rows


def group_normalised(
    reward: Tensor, group: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Returns how much better than its siblings each answer was (GRPO, arXiv:2402.03300, section
    4.1.2)

    reward [B], group [B] int -> [B]: reward minus the group's mean, over its unbiased standard
    deviation. A group that agrees, and a group of one, teaches nothing: exactly 0.
    `scale_by_std=False` is Dr. GRPO (arXiv:2503.20783).
    """
    centred, index, size = _centred(reward, group)
    if scale_by_std:
        variance = torch.zeros_like(size).index_add(0, index, centred**2) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[index] + eps)
    return centred.to(reward.dtype)


def leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    """Returns [B]: the reward minus the mean of the group's others, 0 where there are none.

    RLOO, arXiv:2402.14740, eq. 8.
    """
    centred, index, size = _centred(reward, group)
    others = (size - 1).clamp(min=1)
    return (centred * (size / others)[index]).to(reward.dtype)


def _centred(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (reward minus its group's mean [B], number of each row's group [B], sizes of the
    groups).

    They are in float64: in float32 three rewards of 0.1 do not have the mean 0.1, and the residue
    over eps is a signal.
    """
    exact = reward.double()
    _, index = group.unique(return_inverse=True)
    size = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(
        0, index, torch.ones_like(exact)
    )
    mean = torch.zeros_like(size).index_add(0, index, exact) / size
    return torch.where(varied(exact, group), exact - mean[index], 0.0), index, size


def token_rewards(reward: Tensor, mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """Puts the answer's reward [B] at its last token, minus `penalty` [B, T] at every token.

    0 outside the mask.
    """
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(-1, keepdim=True)
    placed = torch.where(
        mask & (columns == last), reward[:, None], torch.zeros((), dtype=reward.dtype)
    )
    return placed if penalty is None else placed - torch.where(mask, penalty, 0.0)


def discounted_returns(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Sums the reward [B, T] that follows from each token on, discounted a token.

    Holes in the mask take no step.
    """
    found = torch.zeros_like(reward)
    running = reward.new_zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        running = torch.where(mask[:, t], reward[:, t] + gamma * running, running)
        found[:, t] = torch.where(mask[:, t], running, 0.0)
    return found


def whitened(advantage: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Returns numbers of any shape with mean 0 and variance 1 over all tokens of the mask, 0 outside.

    What does not vary becomes 0.
    """
    kept = advantage[mask].double()
    if not len(kept) or kept.min() == kept.max():
        return torch.zeros_like(advantage)
    scaled = (advantage.double() - kept.mean()) / (kept.var(correction=0) + eps).sqrt()
    return torch.where(mask, scaled, 0.0).to(advantage.dtype)


class Scored(NamedTuple):
    """Scored holds what an advantage estimator may look at."""

    reward: Tensor  # [B]
    group: Tensor  # [B] int64
    mask: Ragged  # True where the target is a token that the policy chose
    value: Ragged | None  # of the critic; None where there is none
    # the KL's share of each token's reward; None where it is in the loss
    penalty: Ragged | None


def advantages(batch: Scored, options: Advantage) -> Ragged:
    """Returns the advantage of each token by the estimator of these options.

    An estimator returns that, or [B]: the advantage of all tokens of each answer.
    """
    found = IMPLEMENTATIONS[type(options)](batch, options)
    if isinstance(found, Tensor):
        return batch.mask.with_values(batch.mask.spread(found) * batch.mask.flat)
    assert isinstance(found, Ragged), f"{type(options).__name__} gave {type(found).__name__}"
    return found


@implements(GroupNorm)
def group_norm(batch: Scored, options: GroupNorm) -> Tensor:
    """Returns [B], GRPO's advantages."""
    advantage = group_normalised(batch.reward, batch.group, scale_by_std=options.scale_by_std)
    if options.clip_filter_weight:
        advantage = advantage * clip_filter_weight(
            batch.reward, batch.group, most=options.clip_filter_weight
        )
    return advantage


@implements(LeaveOneOut)
def rloo(batch: Scored, options: LeaveOneOut) -> Tensor:
    """Returns [B], RLOO's advantages. An answer is one action, so the KL of all its tokens is taken off
    its reward before the others' mean is.
    """
    reward = batch.reward
    if batch.penalty is not None:
        chosen = torch.where(batch.mask.flat, batch.penalty.flat, 0.0)
        reward = reward - batch.mask.with_values(chosen).sums()
    return leave_one_out(reward, batch.group)


@implements(Returns)
def reinforce(batch: Scored, options: Returns) -> Ragged:
    """Returns the discounted returns of REINFORCE++ (arXiv:2501.03262)."""

    def returns(reward: Tensor, mask: Tensor, penalty: Tensor | None) -> Tensor:
        return discounted_returns(token_rewards(reward, mask, penalty), mask, options.gamma)

    return by_rows(returns, batch.reward, batch.mask, batch.penalty)


@implements(GAE)
def generalised_advantages(batch: Scored, options: GAE) -> Ragged:
    """Returns PPO's advantages, from the values of a critic."""
    assert batch.value is not None, "algorithm.advantage.type=gae needs a critic"

    def estimate(reward: Tensor, mask: Tensor, value: Tensor, penalty: Tensor | None) -> Tensor:
        rewards = token_rewards(reward, mask, penalty)
        return gae(value, rewards, mask, options.gamma, options.lam)[0]

    return by_rows(estimate, batch.reward, batch.mask, batch.value, batch.penalty)
