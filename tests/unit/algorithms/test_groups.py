"""Groups of answers, against Python's own statistics, group by group."""

from statistics import pstdev

import pytest
import torch

from rftmega.algorithms.groups import deviations, varied


def test_each_group_has_its_own_deviation_and_varies_where_that_is_not_zero() -> None:
    torch.manual_seed(0)
    group = torch.tensor([4, 4, 4, 2, 2, 7, 7, 7, 7, 9])
    score = torch.randn(10) + 3 * group
    score[5:9] = 0.1
    numbers = {
        int(g): [s for s, own in zip(score.tolist(), group.tolist(), strict=True) if own == g]
        for g in group
    }
    wanted = [pstdev(numbers[g]) for g in sorted(numbers)]
    assert deviations(score, group).tolist() == pytest.approx(wanted, abs=1e-7)
    assert varied(score, group).tolist() == [True] * 5 + [False] * 5
