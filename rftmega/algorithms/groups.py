"""Statistics of groups of completions of one prompt."""

import torch
from torch import Tensor


def varied(score: Tensor, group: Tensor) -> Tensor:
    """Returns whether the scores of each row's group differ: score [B], group [B] int -> [B] bool.
    A group with equal scores has no learning signal, so dynamic sampling leaves the group out
    (DAPO, arXiv:2503.14476, eq. 11).
    """
    found, index = group.unique(return_inverse=True)
    lowest = torch.full((len(found),), torch.inf, dtype=score.dtype).scatter_reduce(
        0, index, score, "amin"
    )
    highest = torch.full_like(lowest, -torch.inf).scatter_reduce(0, index, score, "amax")
    return (lowest < highest)[index]


def deviations(score: Tensor, group: Tensor) -> Tensor:
    """Returns the population standard deviation of each group's scores: score [B], group [B] int ->
    [groups] float64.
    """
    _, index, sizes = group.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), dtype=torch.float64)
    means = sums.index_add(0, index, score.double()) / sizes
    squares = (score.double() - means[index]) ** 2
    return (sums.index_add(0, index, squares) / sizes).sqrt()
