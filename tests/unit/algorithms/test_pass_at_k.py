from itertools import combinations

import pytest

from rftmega.algorithms.pass_at_k import pass_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_it_is_the_share_of_all_subsets_that_hold_a_right_answer(samples: int) -> None:
    for right in range(samples + 1):
        completions = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            subsets = [any(subset) for subset in combinations(completions, k)]
            assert pass_at_k(samples, right, k) == pytest.approx(
                sum(subsets) / len(subsets), abs=1e-15
            )


def test_many_samples_lose_no_digits() -> None:
    """The product 1 - k / j of the paper's listing, in another order."""
    wrong = 1.0
    for j in range(10_000 - 3 + 1, 10_001):
        wrong *= 1 - 5000 / j
    assert pass_at_k(10_000, 3, 5000) == pytest.approx(1 - wrong, rel=1e-12)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_more_than_there_are_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="within the answers"):
        pass_at_k(samples, right, k)
