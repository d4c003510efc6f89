"""User-defined regular expressions applied to responses, with a time limit, because pattern or
response may make matching take forever.
"""

import logging

import regex

from rftmega.core.errors import ConfigError

SECONDS = 2.0  # limit of one match; a linear pattern needs milliseconds for the longest response
log = logging.getLogger(__name__)


class Pattern:
    """Pattern is a regular expression whose matching takes at most SECONDS and releases the GIL."""

    def __init__(self, text: str, option: str, *, dot_all: bool = False):
        """`option`: name of the option that has the pattern, for messages.

        `dot_all`: "." matches line ends, too. Raises ConfigError if `text` is not a regular
        expression.
        """
        self.text, self.option = text, option
        try:
            self.compiled = regex.compile(text, regex.DOTALL if dot_all else 0)
        except regex.error as error:
            raise ConfigError(f"{option}={text!r} is no regular expression: {error}") from error
        self._told = False

    def last(self, response: str) -> str | None:
        """Returns the last match in the response, or the match's first group if the pattern has
        groups.

        Returns None if nothing matches or matching takes too long.
        """
        group, found = min(self.compiled.groups, 1), None
        try:
            for match in self.compiled.finditer(response, timeout=SECONDS, concurrent=True):
                found = match
        except TimeoutError:
            self._tell(response)
            return None
        return None if found is None else found[group]

    def whole(self, response: str) -> bool:
        """Returns whether the pattern matches the whole response; False if matching takes too long."""
        try:
            return self.compiled.fullmatch(response, timeout=SECONDS, concurrent=True) is not None
        except TimeoutError:
            self._tell(response)
            return False

    def _tell(self, response: str) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "%s=%r took more than %g s on a completion of %d characters, which it then does not match. Parts like (a+)+ or "
                ".*.* try every way to split a text: write it so that there is one way.",
                self.option,
                self.text,
                SECONDS,
                len(response),
            )
