"""Reward for answers that equal the label."""

import re
from decimal import Decimal

from rftmega.rewards.answer import answer_of
from rftmega.rewards.part import Rule

NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][+-]?\d{1,3})?")


def exact_match_rule(pattern: str, *, ignore_case: bool = False, numeric: bool = False) -> Rule:
    """Returns a rule that scores 1 if the answer (see `answer_of`) equals the label, except for
    surrounding white space; 0 otherwise or for a response without an answer.

    `ignore_case`: Yes equals YES. `numeric`: numbers are equal if their values are, such as 0.5,
    .50 and 5e-1. Raises ConfigError if `pattern` is not a regular expression.
    """
    answered = answer_of(pattern)

    def comparable(text: str) -> str | Decimal:
        text = text.strip()
        if numeric and text.isascii() and NUMBER.fullmatch(text):
            return Decimal(text.replace(",", ""))
        return text.casefold() if ignore_case else text

    def exact_match(response: str, label: str) -> float:
        answer = answered(response)
        return float(answer is not None and comparable(answer) == comparable(label))

    return exact_match
