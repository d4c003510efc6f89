"""Partial credit for an answer that is near, since a small model's first sums are seldom right; and
whether a completion calls the calculator rightly.
"""

import json
import re
from collections.abc import Sequence

from rftmega.examples.smollm.calculator import calculate

SCALE = 4  # a sum that is wrong by so much gets half of the partial credit
DIGITS = 6  # further ones are not read
CALL = re.compile(r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", re.DOTALL)


def near(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """Returns for each completion 1 / (1 + error / SCALE), where the error is that of its last whole
    number; 0 without a number.
    """
    return [_credit(text, int(right)) for text, right in zip(completions, answer, strict=True)]


def called(completions: Sequence[list], answer: Sequence[str], **columns: object) -> list[float]:
    """Returns 1 for each completion (as chat messages) that calls the calculator, and nothing else,
    with an expression whose value is the answer; 0 for others.
    """
    texts = [messages[-1]["content"] for messages in completions]
    return [float(_value(text) == right) for text, right in zip(texts, answer, strict=True)]


def _value(completion: str) -> str:
    """Returns what the calculator says to the call in a completion; empty without a valid call."""
    found = CALL.fullmatch(completion)
    if not found:
        return ""
    try:
        call = json.loads(found[1])
        return calculate(call["arguments"]["expression"]) if call["name"] == "calculate" else ""
    except (KeyError, RecursionError, TypeError, ValueError):
        return ""


def _credit(completion: str, right: int) -> float:
    numbers = re.findall(r"-?\d+", completion)
    if not numbers:
        return 0.0
    return 1 / (1 + abs(int(numbers[-1][:DIGITS]) - right) / SCALE)
