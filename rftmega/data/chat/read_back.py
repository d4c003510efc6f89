"""Recovers messages from the text that a chat template rendered."""

import json
import re
from collections.abc import Callable, Iterator, Sequence

from rftmega.core.errors import DataError
from rftmega.data.chat.replies import Messages

# private-use characters, which occur in no text
BEGIN, END = "\ue000", "\ue001"
Template = Callable[[Messages], str]
"""Renders messages to text, up to the position at which the model continues. Raises DataError for
messages that the chat template refuses.
"""


def read_back(template: Template, known: Messages, unknown: Messages, text: str) -> Messages | None:
    """Returns the `known` messages and the `unknown` ones with contents for which the chat template
    renders `text`; None if no such contents were found.

    `template` renders messages to text. `unknown`: messages without their contents.
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
    """Returns the contents that a template may have rendered as `written`: the same text, the
    stripped text, or a text whose JSON encoding is `written`.
    """
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
    """Yields candidates for the contents of several messages, one list each. `written`: their
    rendered texts. A candidate applies the same interpretation (see `spellings`) to all texts.
    """
    most = max((len(spellings(each)) for each in written), default=0)
    for number in range(most):
        yield [(found := spellings(each))[min(number, len(found) - 1)] for each in written]


def _matched(pattern: str, text: str, count: int) -> list[str] | None:
    """Returns the sections of `text` at the positions of the marks in `pattern`; None if the
    remaining text differs from `pattern`, or `pattern` does not have `count` marks. A mark stands
    for an unknown content in the template's rendering.
    """
    parts = re.split(f"{BEGIN}[0-9]+{END}", pattern)
    if len(parts) != count + 1:  # the template shows a message twice, or not at all
        return None
    found = re.fullmatch("(.*?)".join(map(re.escape, parts)), text, re.DOTALL)
    return list(found.groups()) if found else None
