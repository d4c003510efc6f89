"""Statistics of groups of completions of one prompt."""

import torch
from torch import Tensor


def varied(score: Tensor, group: Tensor) -> Tensor:
    """Returns [B] bool: for each completion, whether the scores in its group differ. `score` [B]:
    the score of each completion; `group` [B] int: the number of its group. A group with equal
    scores has no learning signal, so dynamic sampling leaves the group out (DAPO, arXiv:2503.14476,
    eq. 11).
    """
    found, index = group.unique(return_inverse=True)
    lowest = torch.full((len(found),), torch.inf, dtype=score.dtype).scatter_reduce(
        0, index, score, "amin"
    )
    highest = torch.full_like(lowest, -torch.inf).scatter_reduce(0, index, score, "amax")
    return (lowest < highest)[index]


def deviations(score: Tensor, group: Tensor) -> Tensor:
    """Returns [groups] float64: the population standard deviation of the scores in each group, in
    ascending order of the groups' numbers. `score` [B]: the score of each completion; `group` [B]
    int: the number of its group.
    """
    _, index, sizes = group.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), dtype=torch.float64)
    means = sums.index_add(0, index, score.double()) / sizes
    squares = (score.double() - means[index]) ** 2
    return (sums.index_add(0, index, squares) / sizes).sqrt()
