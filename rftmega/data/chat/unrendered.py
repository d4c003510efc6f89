"""Detection of message parts that a chat template does not render. Each is reported once per file."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rftmega.core.errors import DataError
from rftmega.data.chat.template_forms import REASONING_KEYS, Messages

log = logging.getLogger(__name__)
NAMES = ("role", "name", "tool_call_id", "id", "type", "weight", "from")  # fields without content
CLOSED = "</think>"


@dataclass
class Unrendered:
    """Unrendered finds the parts of messages that are missing in the text rendered by the chat
    template. `render`(messages, open) returns this text; open: whether a completion follows.

    It replaces each text in the messages by a unique mark and searches for the marks in the
    rendered text, so that trimming and JSON encoding make no difference. The result is cached for
    conversations with the same fields.
    """

    render: Callable[[Messages, bool], str]  # of messages, and whether a completion follows
    _known: dict[Any, tuple[tuple[int, str], ...]] = field(default_factory=dict)

    def of(self, messages: Messages, *, open_: bool) -> tuple[tuple[int, str], ...]:
        """Returns (message index, part name) of each part of `messages` that is not rendered.
        `open_`: whether a completion follows the messages.
        """
        numbers = count()
        marks: dict[str, tuple[int, str]] = {}

        def mark(place: int, name: str) -> str:
            text = f"zq{next(numbers)}mark"
            marks[text] = (place, name)
            return text

        marked = [_marked(message, place, mark) for place, message in enumerate(messages)]
        shape = repr(([_without_names(message) for message in marked], open_))
        if shape not in self._known:
            self._known[shape] = tuple(self._missing(marked, marks, open_))
        return self._known[shape]

    def _missing(
        self, marked: Messages, marks: dict[str, tuple[int, str]], open_: bool
    ) -> Iterator[tuple[int, str]]:
        try:
            text = self.render(marked, open_)
        except DataError:  # the template requires other text there; the record itself was rendered
            return
        yield from dict.fromkeys(part for each, part in marks.items() if each not in text)


@dataclass
class Report:
    """Report collects the records of a file that have message parts which the chat template does
    not render. `pending`: such parts of the current record; `places`: part -> locations of the
    records with this part.
    """

    pending: set[str] = field(default_factory=set)  # of the current record
    places: dict[str, list[str]] = field(default_factory=dict)  # part -> the records with it

    def add(self, messages: Messages, missing: tuple[tuple[int, str], ...]) -> None:
        """Adds parts of a record's messages to `pending`. `missing`: (message index, part name) of
        each part that is not rendered, as returned by `Unrendered.of`.
        """
        last = len(messages) - 1
        for place, name in missing:
            role = messages[place]["role"]
            which = "the last message" if place == last else "an earlier message"
            self.pending.add(f"{name} of {which} ({role})")

    def settle(self, place: str) -> None:
        """Ends a record: adds its location `place` under each part in `pending`, and clears
        `pending`.
        """
        for name in sorted(self.pending):
            self.places.setdefault(name, []).append(place)
        self.pending.clear()

    def log(self, source: object) -> None:
        """Logs one warning for each message part that was not rendered in some record of the file
        `source`.
        """
        for name, places in self.places.items():
            log.warning(
                "%s: the chat template does not render %s in %d record(s), the first at %s: the model doesn't see it",
                source,
                name,
                len(places),
                places[0],
            )


def _marked(message: dict[str, Any], place: int, mark: Callable[[int, str], str]) -> dict[str, Any]:
    """Returns a message with each of its texts replaced by a mark. `place`: the message's index;
    `mark` returns a unique mark for (message index, part name).
    """
    found = dict(message)
    for name, value in message.items():
        if name in NAMES or not value:
            continue
        if name == "content":
            found[name] = _marked_content(value, place, mark)
        elif name == "tool_calls":
            found[name] = [_marked_call(call, place, mark) for call in value]
        elif isinstance(value, str):
            found[name] = mark(place, name)
    return found


def _marked_content(value: Any, place: int, mark: Callable[[int, str], str]) -> Any:
    if isinstance(value, list):
        return [
            {**part, "text": mark(place, "content")} if part.get("type") == "text" else part
            for part in value
        ]
    if CLOSED not in value:
        return mark(place, "content")
    opened = "<think>\n" if "<think>" in value else ""
    thought = mark(place, "the thinking in content")
    return f"{opened}{thought}\n{CLOSED}\n\n{mark(place, 'content')}"


def _marked_call(call: dict[str, Any], place: int, mark: Callable[[int, str], str]) -> Any:
    function = call["function"]
    given = dict.fromkeys(function["arguments"], "")
    return {
        **call,
        "function": {
            **function,
            "name": mark(place, "tool_calls"),
            "arguments": {name: mark(place, "tool_calls") for name in given},
        },
    }


def _without_names(message: dict[str, Any]) -> Any:
    """Returns a message's role, fields and calls, but not names and ids, which differ between
    records.
    """
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    kept = {name: value for name, value in message.items() if name not in (*NAMES, "tool_calls")}
    return message["role"], kept, calls


def says_something(message: dict[str, Any], missing: set[str]) -> bool:
    """Returns whether the template renders any part of a message. `missing`: names of the message's
    fields that are not rendered.
    """
    said = {name for name in ("content", "tool_calls", *REASONING_KEYS) if message.get(name)}
    return bool(said - missing)
