"""Weights of completions that depend on whether the rewards of their group differ."""

import torch
from torch import Tensor

from rftmega.algorithms.groups import varied


def clip_filter_weight(
    reward: Tensor, group: Tensor, *, most: float, agreeing: float = 1.0
) -> Tensor:
    """Returns [B]: a weight per completion that makes up for groups with equal rewards, which have
    no learning signal, so that the step size stays the same (CPGD, arXiv:2505.12504). `reward` [B]:
    the reward of each completion; `group` [B] int: the number of its group.

    Completions of a group whose rewards differ are weighted by the number of all groups over the
    number of groups whose rewards differ, at most `most`; completions of a group with equal rewards
    by `agreeing`. If all groups have equal rewards, all weights are 1.
    """
    differs = varied(reward.double(), group)  # integer dtypes have no infinity
    groups, differing = len(group.unique()), len(group[differs].unique())
    weight = torch.ones_like(
        reward, dtype=reward.dtype if reward.is_floating_point() else torch.get_default_dtype()
    )
    if not differing:
        return weight
    return weight.masked_fill(~differs, agreeing).masked_fill(
        differs, min(groups / differing, most)
    )


def clip_filter_like_weight_func(
    rewards: Tensor, clip_filter_like_weight_clip_eps: float = 3.0, lamda: float = 1.0
) -> Tensor:
    """Computes `clip_filter_weight` under LightRFT's names: rewards [B, n], one group per row ->
    weights [B, n]. `clip_filter_like_weight_clip_eps`: maximum weight; `lamda`: weight of
    completions in groups with equal rewards.
    """
    group = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    weight = clip_filter_weight(
        rewards.flatten(), group, most=clip_filter_like_weight_clip_eps, agreeing=lamda
    )
    return weight.view_as(rewards)
