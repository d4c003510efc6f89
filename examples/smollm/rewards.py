"""Partial credit for an answer that is near: a small model's first sums are seldom right."""

import re
from collections.abc import Sequence

SCALE = 4  # a sum that is wrong by so much gets half of the partial credit
DIGITS = 6  # further ones are not read


def near(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """Returns for each completion 1 / (1 + error / SCALE), where the error is that of its last whole
    number; 0 without a number.
    """
    return [_credit(text, int(right)) for text, right in zip(completions, answer, strict=True)]


def _credit(completion: str, right: int) -> float:
    numbers = re.findall(r"-?\d+", completion)
    if not numbers:
        return 0.0
    return 1 / (1 + abs(int(numbers[-1][:DIGITS]) - right) / SCALE)
