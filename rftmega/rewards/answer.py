"""What in a response is its answer."""

import re
from collections.abc import Callable

from rftmega.errors import ConfigError


def answer_of(pattern: str) -> Callable[[str], str | None]:
    """A function from a response to its answer: the last match of `pattern`, its first group where it has one.

    None where nothing matches; the whole response where `pattern` is empty. Raises ConfigError for what is no regular expression.
    """
    if not pattern:
        return lambda response: response
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"reward.answer_pattern={pattern!r} is no regular expression: {error}") from error
    group = min(compiled.groups, 1)

    def last(response: str) -> str | None:
        matches = list(compiled.finditer(response))
        return matches[-1][group] if matches else None

    return last
