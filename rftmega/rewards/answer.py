"""Extracts the answer from a response."""

from collections.abc import Callable

from rftmega.rewards.patterns import Pattern


def answer_of(pattern: str) -> Callable[[str], str | None]:
    """Returns a function from a response to its answer: the last match of `pattern`, its first
    group where it has one.

    None where nothing matches; the whole response where `pattern` is empty. Raises ConfigError for
    what is no regular expression.
    """
    if not pattern:
        return lambda response: response
    return Pattern(pattern, "reward.answer_pattern").last
