"""Extraction of the answer from a response."""

from collections.abc import Callable

from rftmega.rewards.patterns import Pattern


def answer_of(pattern: str) -> Callable[[str], str | None]:
    """Returns a function that extracts a response's answer: the last match of `pattern`, or the
    match's first group if the pattern has groups.

    The function returns None without a match, and the whole response if `pattern` is empty. Raises
    ConfigError if `pattern` is not a regular expression.
    """
    if not pattern:
        return lambda response: response
    return Pattern(pattern, "reward.answer_pattern").last
