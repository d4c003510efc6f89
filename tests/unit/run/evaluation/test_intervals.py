import math
from statistics import stdev

import pytest

from rftmega.run.evaluation.intervals import estimate, share, wilson


def test_an_interval_of_means_is_the_standard_error_over_prompts() -> None:
    values = [0.25, 0.5, 1.0, 0.75, 0.0]
    found = estimate(values)
    half = 1.959964 * stdev(values) / math.sqrt(5)
    assert found == pytest.approx((0.5, 0.5 - half, 0.5 + half, 5), abs=1e-6)


@pytest.mark.parametrize(("right", "trials"), [(0, 8), (3, 8), (8, 8), (81, 263), (0, 1)])
def test_the_ends_of_wilsons_interval_are_where_the_score_test_rejects(
    right: int, trials: int
) -> None:
    """They solve (p - mean)^2 = z^2 p (1 - p) / n, which defines the interval."""
    low, high = wilson(right, trials)
    assert 0 <= low <= right / trials <= high <= 1
    for p in (low, high):
        assert (p - right / trials) ** 2 == pytest.approx(
            1.959964**2 * p * (1 - p) / trials, abs=1e-7
        )


def test_prompts_that_are_right_or_wrong_have_wilsons_interval() -> None:
    assert estimate([1.0, 0.0, 1.0]) == (2 / 3, *wilson(2, 3), 3)
    assert estimate([0.0] * 20)[:2] == (0.0, 0.0)
    assert estimate([0.0] * 20).high == pytest.approx(0.16112, abs=1e-5)  # z^2 / (n + z^2)


def test_a_single_prompt_has_no_interval_and_shares_end_at_0_and_1() -> None:
    assert estimate([0.5]) == (0.5, None, None, 1)
    assert share([0.5]) == (0.5, None, None, 1)
    assert share([0.0, 0.5])[1:3] == (0.0, pytest.approx(0.25 + 1.959964 * 0.25, abs=1e-6))
    assert share([1.0, 0.5]).high == 1.0
    with pytest.raises(ValueError, match="no values"):
        estimate([])
