"""Rewards a response that matches a regular expression."""

from rftmega.rewards.part import Rule
from rftmega.rewards.patterns import Pattern


def format_rule(text: str) -> Rule:
    """Returns a rule that gives 1 where the whole response matches, surrounding white space aside.

    "." matches line ends, too.

    Raises ConfigError for what is no regular expression.
    """
    pattern = Pattern(text, "reward.format_pattern", dot_all=True)
    return lambda response, label: float(pattern.whole(response.strip()))
