"""Rewards in, advantages out."""

import torch
from torch import Tensor


def group_normalised(reward: Tensor, group: Tensor, *, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """How much better than its siblings was each answer? (GRPO, arXiv:2402.03300, section 4.1.2)

    reward [B], group [B] int -> [B]: reward minus the group's mean, over its unbiased standard deviation. A group that
    agrees, and a group of one, teaches nothing: exactly 0. `scale_by_std=False` is Dr. GRPO (arXiv:2503.20783).
    """
    # float64: in float32 three rewards of 0.1 do not have the mean 0.1, and the residue over eps is a signal.
    exact = reward.double()
    _, index = group.unique(return_inverse=True)
    size = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(0, index, torch.ones_like(exact))
    mean = torch.zeros_like(size).index_add(0, index, exact) / size
    centred = exact - mean[index]
    lowest = torch.full_like(size, torch.inf).scatter_reduce(0, index, exact, "amin")
    highest = torch.full_like(size, -torch.inf).scatter_reduce(0, index, exact, "amax")
    centred = torch.where((lowest == highest)[index], 0.0, centred)
    if scale_by_std:
        variance = torch.zeros_like(size).index_add(0, index, centred**2) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[index] + eps)
    return centred.to(reward.dtype)
