"""Reward for answers that equal the label."""

from rftmega.rewards.answer import answer_of
from rftmega.rewards.part import Rule


def exact_match_rule(pattern: str) -> Rule:
    """Returns a rule that scores 1 if the answer (see `answer_of`) equals the label, except for
    surrounding white space; 0 otherwise or for a response without an answer.

    Raises ConfigError if `pattern` is not a regular expression.
    """
    answered = answer_of(pattern)

    def exact_match(response: str, label: str) -> float:
        answer = answered(response)
        return float(answer is not None and answer.strip() == label.strip())

    return exact_match
