"""How much each group of answers counts, once those that teach nothing are seen to."""

import torch
from torch import Tensor


def clip_filter_like_weight_func(rewards: Tensor, clip_filter_like_weight_clip_eps: float = 3.0, lamda: float = 1.0) -> Tensor:
    """rewards [B, n], a group a row -> weights [B, n] that keep the size of a step when groups agree (CPGD, arXiv:2505.12504).

    A group whose rewards differ weighs B over the number of such groups, at most `clip_filter_like_weight_clip_eps`; one that
    agrees weighs `lamda`. Where all agree there is nothing to make up for: all 1.
    """
    agrees = rewards.amin(-1, keepdim=True) == rewards.amax(-1, keepdim=True)  # a deviation of 0.1s need not be 0
    differing = int((~agrees).sum())
    weight = torch.ones_like(rewards, dtype=rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())
    if not differing:
        return weight
    return weight.masked_fill(agrees, lamda).masked_fill(~agrees, min(len(rewards) / differing, clip_filter_like_weight_clip_eps))
