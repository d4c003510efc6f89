"""Types for agents' requests and the responses to them, independent of the API in which they are
sent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftmega.core.types import Completion, Sampling
from rftmega.data.chat.replies import Messages, Reply, calls_of

NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "n": 1}


class RequestRefused(Exception):  # noqa: N818  reported to the agent, ends nothing
    """A request that can't be served; the agent gets the HTTP status and the error message."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Returns the error in the format of OpenAI's API."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "code": self.code}}


@dataclass(frozen=True, slots=True)
class Asked:
    """Asked is an agent's request for a completion, with the context as chat messages."""

    messages: Messages
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens is an agent's request for a completion, with the context as token ids."""

    token_ids: tuple[int, ...]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """Said is the response to an agent's request in chat messages: the completion, as sampled
    (token ids) and parsed into text, reasoning and tool calls.
    """

    reply: Reply
    completion: Completion
    prompt_tokens: int
    pieces: Sequence[str]  # the text of each token

    @property
    def readable(self) -> bool:
        """Returns whether all tool calls of the response could be parsed."""
        return all(call.arguments is not None for call in self.reply.calls)

    @property
    def content(self) -> str:
        """Returns the text of the response without reasoning and calls. If a call could not be
        parsed, the text includes the calls as the model wrote them.
        """
        if self.readable:
            return self.reply.content
        return self.reply.content + "".join(call.text for call in self.reply.calls)

    @property
    def finish_reason(self) -> str:
        """Returns "stop", "length" or "tool_calls", as in OpenAI's API."""
        if self.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.reply.calls and self.readable else "stop"

    @property
    def usage(self) -> tuple[int, int]:
        """Returns (number of context tokens, number of completion tokens)."""
        return self.prompt_tokens, len(self.completion.token_ids)

    def calls(self) -> list[tuple[str, str, str]]:
        """Returns (id, name, arguments as JSON text) of each call; an empty list if a call could
        not be parsed.
        """
        if not self.readable:
            return []
        return [(call.id, call.name, json.dumps(call.arguments)) for call in self.reply.calls]

    def message(self) -> dict[str, Any]:
        """Returns the response as an assistant message, as the agent will include it in later
        requests.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reply.calls and self.readable:
            message["tool_calls"] = calls_of(self.reply)
        return message


def check_sampling(body: Mapping[str, Any], sampling: Sampling) -> None:
    """Raises RequestRefused if sampling parameters in the request `body` differ from `sampling`,
    those of the run: training would use wrong probabilities for the sampled tokens.
    """
    own = sampling._asdict() | NEUTRAL
    for name, value in own.items():
        given = body.get(name)
        neutral = name == "top_k" and given in (-1, 0) and value == 0
        if given is not None and given != value and not neutral:
            raise RequestRefused(
                f"{name}={ascii(given)[:80]} is not the run's, which is {value:g}: what the model says is learnt from as the run "
                f"draws it. Leave {name} out, or change the run's rollout options."
            )
    if body.get("tool_choice") not in (None, "auto"):
        raise RequestRefused("tool_choice can only be auto: a model that is forced can't learn.")


def text_content(content: Any) -> str:
    """Returns the text of a message's content. Raises RequestRefused if the content has a part
    without text, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise RequestRefused(f"a part of type {part.get('type')!r} in a message: give text.")
        parts.append(text)
    return "".join(parts)


def call_message(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call in the format of chat templates, with its arguments as a dictionary.

    Raises RequestRefused for arguments that are not a JSON object.
    """
    try:
        fields = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the arguments of a call of {name} are no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestRefused(f"the arguments of a call of {name} are no JSON object.")
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": fields}}


def named(messages: Messages) -> Messages:
    """Returns a copy of `messages` in which each tool message has the name of its tool, which some
    chat templates require.
    """
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    return [
        {**message, "name": message.get("name") or names.get(message.get("tool_call_id"), "")}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two messages are equal apart from reasoning and call ids, which clients omit
    or change.
    """

    def told(message: Mapping[str, Any]) -> tuple[Any, ...]:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["role"], message.get("content") or "", calls

    return told(one) == told(other)
