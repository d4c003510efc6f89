"""The answer has a shape."""

import re

from rftmega.errors import ConfigError
from rftmega.rewards.part import Rule


def matches_format(response: str, pattern: re.Pattern[str]) -> float:
    """1 where the whole response matches, surrounding white space aside."""
    return float(pattern.fullmatch(response.strip()) is not None)


def format_rule(text: str) -> Rule:
    """The rule of a regular expression, in which "." matches line ends, too. Raises ConfigError where it is none."""
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.format_pattern={text!r} is no regular expression: {error}") from error
    return lambda response, label: matches_format(response, pattern)
