"""Reward for responses that match a regular expression."""

from rftmega.rewards.part import Rule
from rftmega.rewards.patterns import Pattern


def format_rule(text: str) -> Rule:
    """Returns a rule that scores 1 if the whole response, without surrounding white space, matches
    the regular expression `text`, else 0.

    "." matches line ends, too. Raises ConfigError if `text` is not a regular expression.
    """
    pattern = Pattern(text, "reward.format_pattern", dot_all=True)
    return lambda response, label: float(pattern.whole(response.strip()))
