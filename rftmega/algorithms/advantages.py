"""Advantage estimators.

Every estimator sees the whole batch, so a group is never split over processes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.algorithms.filters import clip_filter_weight
from rftmega.algorithms.gae import discounted_returns, gae
from rftmega.algorithms.groups import varied
from rftmega.config.options.algorithms import (
    GAE,
    GDPO,
    GroupNorm,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    Returns,
    TurnNorm,
)
from rftmega.config.options.parts import IMPLEMENTATIONS, Advantage, implements
from rftmega.core.ragged import Ragged, by_rows
from rftmega.core.types import RowsOfRollouts


def group_normalised(
    reward: Tensor, group: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Returns group-normalised advantages (GRPO, arXiv:2402.03300, section 4.1.2).

    reward [B], group [B] int -> [B]: reward minus the group's mean, over the group's unbiased
    standard deviation plus `eps`. A group of equal rewards, or of a single completion, gets exactly
    0. `scale_by_std=False` omits the division, as in Dr. GRPO (arXiv:2503.20783).
    """
    centred, index, size = _centred(reward, group)
    if scale_by_std:
        variance = torch.zeros_like(size).index_add(0, index, centred**2) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[index] + eps)
    return centred.to(reward.dtype)


def leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    """Returns [B]: the reward minus the mean of the group's other rewards; 0 in a group of one.
    `reward` [B]: the reward of each completion; `group` [B] int: the number of its group.

    RLOO, arXiv:2402.14740, eq. 8.
    """
    centred, index, size = _centred(reward, group)
    others = (size - 1).clamp(min=1)
    return (centred * (size / others)[index]).to(reward.dtype)


def _centred(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the reward minus its group's mean [B], the group number of each row [B], and the
    sizes of the groups [groups].

    Rewards and sizes are in float64: in float32 the mean of three rewards of 0.1 is not 0.1, and
    the rounding error divided by `eps` would act as a signal.
    """
    exact = reward.double()
    _, index = group.unique(return_inverse=True)
    size = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(
        0, index, torch.ones_like(exact)
    )
    mean = torch.zeros_like(size).index_add(0, index, exact) / size
    return torch.where(varied(exact, group), exact - mean[index], 0.0), index, size


def token_rewards(
    reward: Tensor, mask: Tensor, penalty: Tensor | None = None, turns: Tensor | None = None
) -> Tensor:
    """Returns token-level rewards [B, T]: the completion's reward [B] at its last token, plus the
    turn rewards `turns` [B, T] at the ends of turns, minus the KL penalty `penalty` [B, T] at every
    token.

    Tokens outside the mask get 0.
    """
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(-1, keepdim=True)
    placed = torch.where(
        mask & (columns == last), reward[:, None], torch.zeros((), dtype=reward.dtype)
    )
    if turns is not None:
        placed = placed + torch.where(mask, turns, 0.0)
    return placed if penalty is None else placed - torch.where(mask, penalty, 0.0)


def whitened(advantage: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Returns `advantage`, of any shape, normalised to mean 0 and variance 1 over all tokens of the
    mask, and 0 outside the mask.

    Constant values become 0.
    """
    kept = advantage[mask].double()
    if not len(kept) or kept.min() == kept.max():
        return torch.zeros_like(advantage)
    scaled = (advantage.double() - kept.mean()) / (kept.var(correction=0) + eps).sqrt()
    return torch.where(mask, scaled, 0.0).to(advantage.dtype)


class RewardComponent(NamedTuple):
    """RewardComponent holds the scores of a reward component before weighting, NaN for completions
    that it does not score, and its weight in each completion's reward, both [R].
    """

    score: Tensor
    weight: Tensor


class Scored(NamedTuple):
    """Scored holds the inputs of an advantage estimator: R completions in B rows (token sequences).

    A completion is a single row, except for rollouts of several trajectories.
    """

    reward: Tensor  # [R]
    group: Tensor  # [R] int64
    mask: Ragged  # B rows, True where the target is a token that the policy chose
    value: Ragged | None  # of the critic; None without a critic
    # the KL penalty in each token's reward; None if the KL is in the loss
    penalty: Ragged | None
    rollouts: RowsOfRollouts | None = None  # rows of each completion; None: one row each
    # the environment's turn rewards, at the last token of each turn; the reward has their sum.
    # None without turn rewards
    turns: Ragged | None = None
    # the reward's components by name, for estimators with `needs_parts`; None for all others
    parts: Mapping[str, RewardComponent] | None = None

    @property
    def rows(self) -> RowsOfRollouts:
        return self.rollouts or RowsOfRollouts.of(None, len(self.mask))

    @property
    def end_reward(self) -> Tensor:
        """Returns [B]: the reward to place at the last token of each row, in addition to the row's
        own turn rewards.

        It consists of the outcome reward and the turn rewards of later rows of the same rollout.
        """
        reward = self.reward[self.rows.of_row]
        if self.turns is None:
            return reward
        own = self.turns.sums().to(reward.dtype)
        whole = own.cumsum(0)
        before = (whole - own)[self.rows.first][self.rows.of_row]
        return reward - (whole - before)


def advantages(batch: Scored, options: Advantage) -> Ragged:
    """Returns the advantage of each token of `batch`, computed by the estimator that `options`
    selects by its class.

    An estimator returns one advantage per token (Ragged), or one per completion ([R]), which all
    tokens of the completion get.
    """
    found = IMPLEMENTATIONS[type(options)](batch, options)
    if isinstance(found, Tensor):
        spread = batch.mask.spread(found[batch.rows.of_row])
        return batch.mask.with_values(spread * batch.mask.flat)
    assert isinstance(found, Ragged), f"{type(options).__name__} gave {type(found).__name__}"
    return found


@implements(GroupNorm)
def group_norm(batch: Scored, options: GroupNorm) -> Tensor:
    """Returns GRPO's advantages, one per completion, [R]."""
    advantage = group_normalised(batch.reward, batch.group, scale_by_std=options.scale_by_std)
    if options.clip_filter_weight:
        advantage = advantage * clip_filter_weight(
            batch.reward, batch.group, most=options.clip_filter_weight
        )
    return advantage


@implements(LeaveOneOut)
def rloo(batch: Scored, options: LeaveOneOut) -> Tensor:
    """Returns RLOO's advantages, one per completion, [R]. A completion is one action, so the KL of
    all its tokens is subtracted from its reward before the mean of the group's other rewards.
    """
    reward = batch.reward
    if batch.penalty is not None:
        chosen = torch.where(batch.mask.flat, batch.penalty.flat, 0.0)
        reward = reward - batch.rows.sums(batch.mask.with_values(chosen).sums())
    return leave_one_out(reward, batch.group)


@implements(MaxRL)
def over_mean(batch: Scored, options: MaxRL) -> Tensor:
    """Returns MaxRL's advantages, one per completion, [R]: (reward - mean) / mean over the group, 0
    in a group whose mean is not positive (arXiv:2602.02710).

    With rewards of 0 and 1 it follows the gradient of log(pass rate), where Dr. GRPO follows that
    of the pass rate: a prompt with pass rate p counts 1 / p times as much.
    """
    centred, index, size = _centred(batch.reward, batch.group)
    mean = torch.zeros_like(size).index_add(0, index, batch.reward.double()) / size
    mean = mean[index]
    return torch.where(mean > 0, centred / mean, 0.0).to(batch.reward.dtype)


@implements(PassAtK)
def best_of_k(batch: Scored, options: PassAtK) -> Tensor:
    """Returns the advantages of pass@k training, one per completion, [R] (arXiv:2508.10751, section
    2.2.3, which has rewards of 0 and 1; here any).

    A completion's advantage is the mean, over all subsets of k completions of its group that it is
    in, of the best reward in the subset, minus this mean over all subsets of k, over the standard
    deviation of the best reward over all subsets. A group of fewer than k has subsets of its own
    size, and no advantage.
    """
    found = torch.zeros_like(batch.reward)
    for number in batch.group.unique():
        own = (batch.group == number).nonzero()[:, 0]
        found[own] = _best_of_subsets(batch.reward[own].double(), options.k).to(found.dtype)
    return found


def _best_of_subsets(reward: Tensor, k: int) -> Tensor:
    """Returns the advantages of one group's rewards, [N]: see `best_of_k`."""
    size = len(reward)
    k = min(k, size)
    ascending, order = reward.sort()
    # the share of subsets of k whose best is the j-th smallest reward
    best = _shares([math.comb(j, k - 1) for j in range(size)], math.comb(size, k))
    mean = (best * ascending).sum()
    deviation = (best * (ascending - mean).square()).sum().sqrt()
    if deviation == 0:
        return torch.zeros_like(reward)
    others = math.comb(size - 1, k - 1)  # subsets that a given completion is in
    alone = _shares([math.comb(j, k - 1) for j in range(size)], others)
    later = _shares([math.comb(j - 1, k - 2) if j and k > 1 else 0 for j in range(size)], others)
    worth = later * ascending
    behind = worth.flip(0).cumsum(0).flip(0) - worth  # the best is a larger one than its own
    found = torch.empty_like(reward)
    found[order] = (alone * ascending + behind - mean) / deviation
    return found


def _shares(counts: list[int], total: int) -> Tensor:
    return torch.tensor([count / total for count in counts], dtype=torch.float64)


@implements(GDPO)
def normalised_by_component(batch: Scored, options: GDPO) -> Tensor:
    """Returns GDPO's advantages, one per completion, [R] (arXiv:2601.05242, eq. 4 to 6): GRPO's
    advantage of each reward component, their weighted sum, whitened over all completions.

    GRPO normalises the sum, so that a component of small spread is lost beside one of large spread.
    """
    assert batch.parts is not None, "whoever makes the experience gives the components"
    total = torch.zeros(len(batch.reward), dtype=torch.float64)
    for score, weight in batch.parts.values():
        there = score.isfinite()
        if there.any():
            normal = group_normalised(score[there].double(), batch.group[there])
            total[there] += weight[there].double() * normal
    return whitened(total, torch.ones_like(total, dtype=torch.bool)).to(batch.reward.dtype)


@implements(Returns)
def reinforce(batch: Scored, options: Returns) -> Ragged:
    """Returns the advantages of REINFORCE++ (arXiv:2501.03262): the discounted return of each
    token.
    """

    def returns(
        reward: Tensor, mask: Tensor, penalty: Tensor | None, turns: Tensor | None
    ) -> Tensor:
        rewards = token_rewards(reward, mask, penalty, turns)
        return discounted_returns(rewards, mask, options.gamma)

    return by_rows(returns, batch.end_reward, batch.mask, batch.penalty, batch.turns)


@implements(TurnNorm)
def turn_norm(batch: Scored, options: TurnNorm) -> Ragged:
    """Returns GRPO's advantages with process supervision (arXiv:2402.03300, section 4.1.3): each
    turn's reward minus the mean over all turns of its group, over the unbiased standard deviation
    of these rewards; a token's advantage is the sum over its turn and all later turns of the
    rollout.

    The part of a rollout's reward that no turn reward accounts for is added to the rollout's last
    turn.
    """
    mask = batch.mask
    turns = mask.with_values(torch.zeros(len(mask.flat))) if batch.turns is None else batch.turns
    number = turn_numbers(mask)  # of each token of the mask, counted over all rows
    count = int(number.max()) + 1 if len(number) else 0
    rollout = torch.zeros(count, dtype=torch.int64)
    rollout[number] = mask.spread(batch.rows.of_row)[mask.flat]
    reward = torch.zeros(count, dtype=torch.float64)
    reward.index_add_(0, number, turns.flat[mask.flat].double())
    given = torch.zeros(len(batch.reward), dtype=torch.float64).index_add(0, rollout, reward)
    last = torch.zeros(len(batch.reward), dtype=torch.int64)
    last[rollout] = torch.arange(count)  # a later turn overwrites
    taught = torch.zeros(len(batch.reward), dtype=torch.bool)
    taught[rollout] = True
    reward.index_add_(0, last[taught], (batch.reward.double() - given)[taught])
    normal = group_normalised(reward, batch.group[rollout], scale_by_std=options.scale_by_std)
    ends = normal.flip(0).cumsum(0).flip(0)
    behind = torch.cat([ends, ends.new_zeros(1)])[last + 1]  # of the rollouts that follow
    found = torch.zeros(len(mask.flat))
    found[mask.flat] = (ends - behind[rollout])[number].float()
    return mask.with_values(found)


def turn_numbers(mask: Ragged) -> Tensor:
    """Returns the turn number of each token of the mask, [tokens of the mask], counted over all
    rows from 0.

    A turn is a contiguous run of tokens that the policy chose.
    """
    begins = torch.zeros(len(mask.flat), dtype=torch.bool)
    begins[1:] = ~mask.flat[:-1]
    begins[(mask.lengths.cumsum(0) - mask.lengths)[mask.lengths > 0]] = True
    return (begins & mask.flat).cumsum(0)[mask.flat] - 1


@implements(GAE)
def generalised_advantages(batch: Scored, options: GAE) -> Ragged:
    """Returns PPO's advantages (GAE), one per token, from the values of a critic."""
    assert batch.value is not None, "algorithm.advantage.type=gae needs a critic"

    def estimate(
        reward: Tensor,
        mask: Tensor,
        value: Tensor,
        penalty: Tensor | None,
        turns: Tensor | None,
    ) -> Tensor:
        rewards = token_rewards(reward, mask, penalty, turns)
        return gae(value, rewards, mask, options.gamma, options.lam)[0]

    return by_rows(estimate, batch.end_reward, batch.mask, batch.value, batch.penalty, batch.turns)
