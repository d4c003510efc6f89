"""Encoder converts values of records into token ids and checks them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.data.chat.messages import chat_messages, parsed, tool_specs
from rftmega.data.chat.template import answered, ends_in_text
from rftmega.data.chat.template_forms import Messages
from rftmega.data.chat.unrendered import Report, says_something
from rftmega.data.examples import TooLong, required
from rftmega.data.records import Record, value_at
from rftmega.data.tokenizer import Tokenizer

INSTRUCTION, INPUT = "instruction", "input"  # keys of Alpaca's records


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes prompts and responses of records under the length limits of a run.

    The methods raise DataError for invalid values and TooLong for values over a length limit.
    `placeholders`: control tokens for media that prompts may contain; `tools`: function specs of
    the record; `report` collects the message parts that the chat template does not render.
    """

    tokenizer: Tokenizer
    config: DataConfig
    max_prompt_tokens: int
    max_response_tokens: int = 0  # read by `completion`
    placeholders: Collection[str] = ()  # of media, see Tokenizer.encode
    report: Report = field(default_factory=Report)
    tools: tuple[dict[str, Any], ...] = ()  # of the record

    def for_record(self, record: Record) -> "Encoder":
        """Returns an encoder for one record, which passes the record's own function specs, if it
        has any, to the chat template.
        """
        key = self.config.tools_key
        tools = tool_specs(value_at(record, key), key)
        if tools and not self.tokenizer.template.reads_tools:
            self.report.pending.add(f'"{key}"')
        return replace(self, tools=tools) if tools else self

    @property
    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = {"chat_template": self.config.chat_template}
        return given | {"tools": self.tools} if self.tools else given

    def given_prompt(self, record: Record) -> Any:
        """Returns the prompt of a record: a string, or checked chat messages.

        Appends the text under data.alpaca_input_key (Alpaca's `input`) to a string prompt.
        """
        config = self.config
        found = self.messages(
            required(record, config.prompt_key, "data.prompt_key"), config.prompt_key
        )
        key = config.alpaca_input_key or (INPUT if config.prompt_key == INSTRUCTION else "")
        further = value_at(record, key) if key else None
        if further is None or further == "":
            return found
        if not isinstance(further, str) or not isinstance(found, str):
            raise DataError(
                f'"{key}" stands behind the text of "{config.prompt_key}", and one of them is no text. Set '
                "data.alpaca_input_key to a key that no record has, or make both text."
            )
        return f"{found}\n\n{further}"

    def messages(self, value: Any, key: str) -> Any:
        """Returns checked chat messages if `value` is a list of messages or the JSON text of one;
        returns any other value unchanged. `key`: the record's key of `value`, for error messages.
        """
        found = parsed(value)
        if not isinstance(found, list) or not found:
            return value
        return chat_messages(found, key, lambda: self.tokenizer.template.roles())

    def prompt(self, value: Any) -> tuple[int, ...]:
        """Returns the token ids of a prompt: a string, or chat messages as returned by `messages`.
        Raises DataError for any other value.
        """
        if not isinstance(value, str | list) or not value:
            raise DataError(
                f'"{self.config.prompt_key}" must be a string or a list of chat messages, and not empty.'
            )
        options = self._given
        if self.placeholders:
            options |= {"placeholders": self.placeholders}
        ids = self.tokenizer.encode(value, **options)
        if not ids:
            raise DataError(f"the tokenizer makes no token of {value!r}.")
        _check_length("prompt", ids, "rollout.max_prompt_tokens", self.max_prompt_tokens)
        if isinstance(value, list):
            self.report.add(value, self.tokenizer.template.unrendered.of(value, open_=True))
        return ids

    def completion(self, prompt: Any, value: Any, key: str) -> tuple[int, ...]:
        """Returns the token ids of the response to `prompt`, including its end token. `value`: the
        response as a string, or as one assistant message with all fields that the chat template
        renders. `key`: the record's key of `value`, for error messages.
        """
        completion = self._one_completion(value, key)
        options = self._given | ({"placeholders": self.placeholders} if self.placeholders else {})
        ids = self.tokenizer.encode_response(prompt, completion, **options)
        _check_length("answer", ids, "rollout.max_response_tokens", self.max_response_tokens)
        if isinstance(prompt, list):
            self._report_completion(prompt, completion)
        return ids

    def _one_completion(self, value: Any, key: str) -> str | dict[str, Any]:
        """Returns a response as text, or as a message if it has fields besides role and text
        content.
        """
        given = [value] if isinstance(value, dict) else value
        if isinstance(given, list) and len(given) == 1:
            (message,) = self.messages(given, key)
            if message["role"] == "assistant":
                content = message["content"]
                plain = set(message) == {"role", "content"} and isinstance(content, str)
                return content if plain else message
        if not isinstance(given, str) or not given:
            raise DataError(
                f'"{key}" must be a string or one message of the assistant, and not empty.'
            )
        return given

    def _report_completion(self, prompt: Messages, completion: str | dict[str, Any]) -> None:
        """Adds the parts of a response that the chat template does not render to the report. Raises
        DataError if the chat template renders no part of the response.
        """
        whole = answered(prompt, completion)
        missing = self.tokenizer.template.unrendered.of(whole, open_=False)
        own = {name for place, name in missing if place == len(whole) - 1}
        if not says_something(whole[-1], own):
            raise DataError(
                f"the chat template renders nothing of the answer, which has {', '.join(sorted(own))}. Give another template "
                "(data.chat_template_file), or leave the record out."
            )
        self.report.add(whole, missing)


def by_assistant(messages: Any) -> bool:
    """Returns whether a value is a list of chat messages whose last message is the assistant's."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def check_continued(messages: Any, config: DataConfig) -> None:
    """Raises DataError if a prompt ends with an assistant message that has no text to continue, or
    if data.trailing_assistant rejects such prompts.
    """
    if not by_assistant(messages):
        return
    if config.trailing_assistant == "reject":
        raise DataError(
            f'"{config.prompt_key}" ends with a message of the assistant, and data.trailing_assistant=reject. Leave that message '
            "out, or set data.trailing_assistant=continue: completions then go on with its text."
        )
    if not ends_in_text(messages):
        raise DataError(
            f'"{config.prompt_key}" ends with a message of the assistant that has calls or no text, with which no answer can go '
            "on. Leave that message out."
        )


def _check_length(what: str, ids: Sequence[int], option: str, limit: int) -> None:
    if len(ids) > limit:
        raise TooLong(
            f"the {what} has {len(ids)} tokens, {option} is {limit}. Raise it, shorten the {what}, or set data.too_long=drop."
        )
