"""A user's regular expressions on a policy's answers: either may make matching take for ever, so it
is ended.
"""

import logging

import regex

from rftmega.core.errors import ConfigError

SECONDS = 2.0  # of one match; a linear pattern needs milliseconds for the longest answer
log = logging.getLogger(__name__)


class Pattern:
    """Pattern is a regular expression whose matching takes SECONDS at most, without the
    interpreter's lock.
    """

    def __init__(self, text: str, option: str, *, dot_all: bool = False):
        """`option` names it in messages.

        `dot_all`: "." matches line ends, too. Raises ConfigError for no regular expression.
        """
        self.text, self.option = text, option
        try:
            self.compiled = regex.compile(text, regex.DOTALL if dot_all else 0)
        except regex.error as error:
            raise ConfigError(f"{option}={text!r} is no regular expression: {error}") from error
        self._told = False

    def last(self, response: str) -> str | None:
        """Returns the last match, its first group where it has one.

        None where nothing matches, or that took too long.
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
        """Returns whether the pattern matches the whole response; False where that took too long."""
        try:
            return self.compiled.fullmatch(response, timeout=SECONDS, concurrent=True) is not None
        except TimeoutError:
            self._tell(response)
            return False

    def _tell(self, response: str) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "%s=%r took more than %g s on an answer of %d characters, which it then does not match. Parts like (a+)+ or .*.* "
                "try every way to split a text: write it so that there is one way.",
                self.option,
                self.text,
                SECONDS,
                len(response),
            )
