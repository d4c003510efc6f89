"""Detection of the message format that a chat template reads, and conversion of messages into this
format.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rftmega.core.errors import DataError
from rftmega.core.json_files import NotJSON, parse_json

Messages = list[dict[str, Any]]
MARK, OTHER = "zq7mark", "zq8mark"  # texts that no template contains
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
USER = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class TemplateForms:
    """TemplateForms detects which message format a chat template reads, by rendering test messages
    with `render` (messages -> text).

    It does not read the template's source, so it works for any template.
    """

    render: Callable[[Messages], str]

    def adapted(self, messages: Messages) -> Messages:
        """Returns messages in the format that the template reads.

        Raises DataError if the template does not render the content of user messages, or if
        messages have non-text parts and the template renders only text.
        """
        if not self.text and not self.parts and not self.unknown:
            raise DataError(
                "the chat template renders nothing of what a user says: every prompt would be the same. Give another "
                "(data.chat_template_file)."
            )
        return [self._adapted(message) for message in messages]

    @cached_property
    def unknown(self) -> bool:
        """Returns whether the template refuses a conversation of one user message, so that its
        properties can't be detected.
        """
        return self._rendered([{"role": "user", "content": MARK}]) is None

    @cached_property
    def text(self) -> bool:
        """Returns whether the template renders content that is a string."""
        return MARK in (self._rendered([{"role": "user", "content": MARK}]) or "")

    @cached_property
    def parts(self) -> bool:
        """Returns whether the template renders content that is a list of parts, other than as the
        list's repr.
        """
        part = {"type": "text", "text": MARK}
        found = self._rendered([{"role": "user", "content": [part]}]) or ""
        return MARK in found and "'text'" not in found and '"text"' not in found

    @cached_property
    def arguments_as_text(self) -> bool:
        """Returns whether the template renders the arguments of a call only if they are JSON text."""
        as_dict, as_text = (
            self._answered(tool_calls=[_call({"name": "f", "arguments": given})])
            for given in ({MARK: OTHER}, json.dumps({MARK: OTHER}))
        )
        good = MARK in as_dict and f"'{MARK}'" not in as_dict
        return not good and MARK in as_text

    @cached_property
    def reasoning_key(self) -> str:
        """Returns the name of the message field whose reasoning the template renders; "" if there
        is none.
        """
        calls = [_call({"name": "f", "arguments": {}})]
        for key in REASONING_KEYS:
            alone = self._answered(content="x", **{key: MARK})
            if MARK in alone or MARK in self._answered(tool_calls=calls, **{key: MARK}):
                return key
        return ""

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message, dict):
            return message
        found = dict(message)
        content = message.get("content")
        if isinstance(content, list) and not self.parts:
            found["content"] = _joined(content)
        elif isinstance(content, str) and content and not self.text and self.parts:
            found["content"] = [{"type": "text", "text": content}]
        if message.get("tool_calls"):
            found["tool_calls"] = [self._called(call) for call in message["tool_calls"]]
        given = [key for key in REASONING_KEYS if isinstance(message.get(key), str)]
        if given and self.reasoning_key and self.reasoning_key not in message:
            found[self.reasoning_key] = found.pop(given[0])
        return found

    def _called(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        given = function.get("arguments")
        if isinstance(given, str) and not self.arguments_as_text:
            try:
                given = parse_json(given)
            except NotJSON:  # of a program's own call: the template decides what it accepts
                return call
        elif isinstance(given, Mapping) and self.arguments_as_text:
            given = json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": given}}

    def _answered(self, **fields: Any) -> str:
        completion = {"role": "assistant", "content": "", **fields}
        return self._rendered([USER, completion]) or ""

    def _rendered(self, messages: Messages) -> str | None:
        """Returns the text of messages; None if the template refuses the messages."""
        try:
            return self.render(messages)
        except DataError:
            return None


def _joined(parts: list[Any]) -> str:
    """Joins text parts with line feeds.

    Raises DataError for a non-text part.
    """
    return "\n".join(_texts(parts))


def _texts(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(
                f"the chat template renders text alone, and a message has a part of the type {kind!r}. Leave it out, or take "
                "a model that reads such parts."
            )
        yield str(part["text"])


def _call(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": "call00000", "function": function}
