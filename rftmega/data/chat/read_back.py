"""Reads messages back from the text that a chat template made of them."""

import json
import re
from collections.abc import Callable, Iterator, Sequence

from rftmega.core.errors import DataError
from rftmega.data.chat.replies import Messages

# characters for private use, which nobody says
BEGIN, END = "\ue000", "\ue001"
Template = Callable[[Messages], str]
"""Returns the text of messages, up to where the model goes on. Raises DataError."""


def read_back(template: Template, known: Messages, unknown: Messages, text: str) -> Messages | None:
    """Returns `known` and the `unknown` messages, with the contents for which the template gives
    `text`; None where there are none.

    `unknown`: messages whose contents are to be found.
    """
    marked = [
        {**message, "content": f"{BEGIN}{number}{END}"} for number, message in enumerate(unknown)
    ]
    try:
        pattern = template([*known, *marked])
        found = _matched(pattern, text, len(unknown))
        for contents in alike(found or ()):
            filled = zip(unknown, contents, strict=True)
            messages = [*known, *({**each, "content": content} for each, content in filled)]
            if template(messages) == text:
                return messages
    except DataError:  # the template takes no such conversation
        return None
    return None


def spellings(written: str) -> list[str]:
    """Returns what may have been said where a template wrote this: the same, or JSON of it."""
    found = [written, written.strip()]
    for text in (written, f'"{written}"'):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str):
            found.append(value)
    return list(dict.fromkeys(found))


def alike(written: Sequence[str]) -> Iterator[list[str]]:
    """Yields readings of several texts that a template wrote: all of them as they are, or all of
    them read as JSON.
    """
    most = max((len(spellings(each)) for each in written), default=0)
    for number in range(most):
        yield [(found := spellings(each))[min(number, len(found) - 1)] for each in written]


def _matched(pattern: str, text: str, count: int) -> list[str] | None:
    """Returns what stands in `text` in the places of the marks of `pattern`."""
    parts = re.split(f"{BEGIN}[0-9]+{END}", pattern)
    if len(parts) != count + 1:  # the template shows a message twice, or not at all
        return None
    found = re.fullmatch("(.*?)".join(map(re.escape, parts)), text, re.DOTALL)
    return list(found.groups()) if found else None
