"""Types for parsed completions and for the tokens that follow them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rftmega.core.types import Turn

Messages = list[dict[str, Any]]
Specs = Sequence[Mapping[str, Any]]  # of functions, in OpenAI's format

UNREAD = (
    "The call could not be read. Write the name of a function and its arguments as a JSON object, in the format that you were "
    "given, and end the call."
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """ToolCall is a function call written by the model."""

    name: str
    arguments: dict[str, Any] | None  # None: they could not be parsed
    text: str  # as the model wrote it
    id: str  # nine letters and digits, as the strictest templates require; or the model's own


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply is a parsed completion: content, reasoning and function calls. `complete`: the model
    ended the completion; `problem`: error message to the model if a call could not be parsed;
    `spoken`: the text before the first call, reasoning included.
    """

    content: str  # for the user: no reasoning, no calls
    reasoning: str
    calls: tuple[ToolCall, ...]
    complete: bool  # ended by the model; False: truncated
    problem: str = ""  # message to the model if a call could not be parsed
    text: str = ""  # the whole text, special tokens by their names, without the token that ended it
    spoken: str = ""  # the same up to the first call


@dataclass(frozen=True, slots=True)
class Bridge:
    """Bridge holds the tokens that continue a conversation between one completion and the next, so
    that earlier text is not tokenized again, and the turns (messages) in these tokens.
    """

    token_ids: tuple[int, ...]  # after the completion, up to where the model continues
    turns: tuple[Turn, ...]  # of the messages; positions are relative to the first of `token_ids`


class MessageTemplate(Protocol):
    """MessageTemplate is the interface of data.ChatTemplate, which renders messages to text."""

    def text(self, messages: Messages, *, open_: bool, tools: Specs | None = None) -> str: ...
    def source(self) -> str: ...


class Control(Protocol):
    """Control is the interface of data.ControlTokens, which distinguishes a tokenizer's control
    tokens from plain text that contains their names.
    """

    def found(self, value: Any, *, words: bool = False) -> list[str]: ...
    def hidden(self, value: Any, *, words: bool = False) -> Any: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...


class ChatTokenizer(Protocol):
    """ChatTokenizer is the interface of data.Tokenizer that a conversation uses."""

    stop_ids: list[int]

    @property
    def control(self) -> Control: ...
    @property
    def inner(self) -> Any: ...
    @property
    def size(self) -> int: ...
    @property
    def chat(self) -> Any: ...
    @property
    def template(self) -> MessageTemplate: ...
    def encode_reply(self, text: str) -> tuple[int, ...]: ...
    def recorded(self, messages: Messages) -> Messages: ...
    def encode_behind(self, before: str, text: str) -> tuple[int, ...]: ...


def text_of(tokenizer: ChatTokenizer, token_ids: Sequence[int]) -> str:
    """Returns the text of token ids; special tokens appear by name."""
    inner, ids = tokenizer.inner, list(token_ids)
    if inner.is_fast:  # transformers' own checks per token take longer than decoding
        text: str = inner.backend_tokenizer.decode(ids, skip_special_tokens=False)
    else:
        text = inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def token_id(tokenizer: ChatTokenizer, text: str) -> int | None:
    """Returns the id of the token whose text is `text`; None if there is no such token."""
    found = tokenizer.inner.convert_tokens_to_ids(text)
    unknown = found is None or found == tokenizer.inner.unk_token_id
    return None if unknown else int(found)


def calls_of(reply: Reply) -> list[dict[str, Any]]:
    """Returns the calls of a parsed completion in the format of chat messages, with arguments as
    dictionaries.
    """
    return [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.calls
    ]
