"""maj@k: the chance that the most frequent answer of k completions is correct."""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb
from typing import Any, NamedTuple

import numpy


class Vote(NamedTuple):
    """Vote is a completion's answer, None if it gives none and so does not vote, and its
    correctness.
    """

    answer: Hashable | None
    right: float  # 1 for a correct completion, else 0


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Returns the probability that the most frequent answer of k of a prompt's completions, drawn
    without replacement, is correct. Equally frequent answers win with equal probability; if no
    drawn completion votes, the result is wrong. An answer is as correct as the mean of its
    completions.

    Computed exactly, by counting draws. Raises ValueError unless 1 <= k <= number of votes.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(
            f"maj@{k} of {len(votes)} answers: k must be within the answers, and k >= 1."
        )
    sizes = Counter(vote.answer for vote in votes if vote.answer is not None)
    silent = len(votes) - sum(sizes.values())
    all_sizes = tuple(sorted(sizes.values()))
    found = 0.0
    for answer, size in sizes.items():
        right = sum(vote.right for vote in votes if vote.answer == answer)
        found += right / size * _wins(size, all_sizes, silent, k) if right else 0.0
    return found


@lru_cache(4096)
def _wins(size: int, sizes: tuple[int, ...], silent: int, k: int) -> float:
    """Returns the probability that one answer with `size` votes wins among k drawn completions.

    `sizes`: numbers of votes of all answers, including this one; `silent`: number of completions
    without an answer.
    """
    others = list(sizes)
    others.remove(size)
    draws = comb(sum(sizes) + silent, k)
    found = 0.0
    for own in range(1, min(size, k) + 1):
        ways = _ways(others, silent, own, k - own)
        found += sum(
            comb(size, own) * number / (draws * (tied + 1)) for tied, number in enumerate(ways)
        )
    return found


def _ways(others: Sequence[int], silent: int, most: int, k: int) -> list[int]:
    """Returns the number of ways to draw k of the other answers' completions, by the number of
    answers that are drawn `most` times, where none is drawn more often.

    `others`: numbers of votes of the other answers; `silent`: completions without an answer, of
    which any number may be drawn.
    """
    tied = min(len(others), k // most)
    ways: Any = numpy.zeros((k + 1, tied + 1), dtype=object)  # [drawn, tied], exact integers
    ways[:, 0] = [comb(silent, drawn) for drawn in range(k + 1)]
    for votes in others:
        more = numpy.zeros_like(ways)
        for drawn in range(min(votes, most - 1, k) + 1):
            more[drawn:] += comb(votes, drawn) * ways[: k + 1 - drawn]
        if votes >= most and most <= k:
            more[most:, 1:] += comb(votes, most) * ways[: k + 1 - most, :-1]
        ways = more
    return [int(number) for number in ways[k]]
