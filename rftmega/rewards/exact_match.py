"""Rewards an answer that equals the label."""

from rftmega.rewards.answer import answer_of
from rftmega.rewards.part import Rule


def exact_match_rule(pattern: str) -> Rule:
    """Returns a rule that gives 1 where the answer (see `answer_of`) is the label, surrounding
    white space aside; 0 for a response without an answer.

    Raises ConfigError where `pattern` is no regular expression.
    """
    answered = answer_of(pattern)

    def exact_match(response: str, label: str) -> float:
        answer = answered(response)
        return float(answer is not None and answer.strip() == label.strip())

    return exact_match
