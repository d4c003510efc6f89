import random
from collections import Counter
from itertools import combinations

import pytest

from rftmega.algorithms.majority_at_k import Vote, majority_at_k


def by_hand(votes: list[Vote], k: int) -> float:
    """The mean over all subsets of k completions of the share of the most frequent answers that are right."""
    found = []
    for subset in combinations(votes, k):
        counts = Counter(vote.answer for vote in subset if vote.answer is not None)
        most = [each for each in counts if counts[each] == max(counts.values())]
        shares = [[vote.right for vote in votes if vote.answer == each] for each in most]
        found.append(sum(sum(own) / len(own) for own in shares) / len(shares) if shares else 0.0)
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_share_of_all_subsets_whose_most_frequent_answer_is_right(seed: int) -> None:
    drawn = random.Random(seed)
    number = drawn.randint(1, 9)
    votes = [Vote(drawn.choice([None, *"abcd"]), drawn.random() < 0.4) for _ in range(number)]
    for k in range(1, number + 1):
        assert majority_at_k(votes, k) == pytest.approx(by_hand(votes, k), abs=1e-12)


def test_of_all_completions_the_most_frequent_answer_counts_alone() -> None:
    right, wrong, silent = Vote("7", 1.0), Vote("8", 0.0), Vote(None, 0.0)
    assert majority_at_k([right, right, wrong, silent, silent, silent], 6) == 1.0
    assert majority_at_k([right, wrong], 2) == 0.5
    assert majority_at_k([silent, silent], 2) == 0.0


@pytest.mark.parametrize("k", [0, 3])
def test_a_k_beyond_the_answers_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="within the answers"):
        majority_at_k([Vote("7", 1.0)] * 2, k)
