"""Weights of groups of answers, by whether their rewards differ."""

import torch
from torch import Tensor

from rftmega.algorithms.groups import varied


def clip_filter_weight(
    reward: Tensor, group: Tensor, *, most: float, agreeing: float = 1.0
) -> Tensor:
    """Returns [B]: weights that keep the size of a step when groups agree (CPGD, arXiv:2505.12504).

    Answers of a group whose rewards differ weigh all groups over such groups, at most `most`; those
    of one that agrees weigh `agreeing`. Where all agree there is nothing to make up for: all 1.
    """
    differs = varied(reward.double(), group)  # whole numbers have no infinity to begin with
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
    """Calls `clip_filter_weight` by LightRFT's name and arguments: rewards [B, n], a group a row ->
    weights [B, n].
    """
    group = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    weight = clip_filter_weight(
        rewards.flatten(), group, most=clip_filter_like_weight_clip_eps, agreeing=lamda
    )
    return weight.view_as(rewards)
