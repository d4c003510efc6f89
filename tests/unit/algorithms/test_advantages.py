import itertools

import pytest
import torch

from rftmega.algorithms.advantages import group_normalised


def by_hand(rewards: list[float], groups: list[int]) -> list[float]:
    """A double loop in float64, straight from the paper."""
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(siblings) / len(siblings)
        if len(set(siblings)) == 1:
            found.append(0.0)
            continue
        variance = sum((r - mean) ** 2 for r in siblings) / (len(siblings) - 1)
        found.append((reward - mean) / (variance**0.5 + 1e-6))
    return found


def test_it_equals_the_formula_on_ragged_interleaved_groups() -> None:
    rewards, groups = [1.0, 0.0, 0.25, 1.0, -2.0, 0.5, 0.5], [3, 0, 3, 0, 0, 3, 9]
    found = group_normalised(torch.tensor(rewards), torch.tensor(groups))
    torch.testing.assert_close(found, torch.tensor(by_hand(rewards, groups)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("reward", "size"), list(itertools.product([0.1, 0.3, 0.9, 1e9], [2, 3, 7])))
def test_a_group_that_agrees_teaches_exactly_nothing(reward: float, size: int) -> None:
    found = group_normalised(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64))
    assert found.tolist() == [0.0] * size


def test_a_group_of_one_teaches_nothing() -> None:
    assert group_normalised(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]


def test_without_std_it_is_the_distance_to_the_mean() -> None:
    found = group_normalised(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), scale_by_std=False)
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]
