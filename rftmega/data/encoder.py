"""Encodes the values of a record as checked token ids."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rftmega.config import DataConfig
from rftmega.data.examples import TooLong
from rftmega.data.tokenizer import Tokenizer
from rftmega.errors import DataError


@dataclass(frozen=True, slots=True)
class Encoder:
    """Prompts and answers of records under the limits of a run.

    Its methods raise DataError, or TooLong.
    """

    tokenizer: Tokenizer
    config: DataConfig
    max_prompt_tokens: int
    max_response_tokens: int = 0  # read by `answer`
    placeholders: Collection[str] = ()  # of media, see Tokenizer.encode

    def prompt(self, value: Any) -> tuple[int, ...]:
        """Returns the token ids of a string or of chat messages."""
        if not isinstance(value, str | list) or not value:
            raise DataError(
                f'"{self.config.prompt_key}" must be a string or a list of chat messages, and not empty.'
            )
        options: dict[str, Any] = {"chat_template": self.config.chat_template}
        if self.placeholders:
            options["placeholders"] = self.placeholders
        ids = self.tokenizer.encode(value, **options)
        if not ids:
            raise DataError(f"the tokenizer makes no token of {value!r}.")
        _check_length("prompt", ids, "rollout.max_prompt_tokens", self.max_prompt_tokens)
        return ids

    def answer(self, prompt: Any, value: Any, key: str) -> tuple[int, ...]:
        """Returns the token ids of the answer to `prompt`, its end included: of a string, or of one
        message of the assistant's.
        """
        text = (
            value[0].get("content")
            if isinstance(value, list) and len(value) == 1 and by_assistant(value)
            else value
        )
        if not isinstance(text, str) or not text:
            raise DataError(
                f'"{key}" must be a string or one message of the assistant, and not empty.'
            )
        ids = self.tokenizer.encode_answer(prompt, text, chat_template=self.config.chat_template)
        _check_length("answer", ids, "rollout.max_response_tokens", self.max_response_tokens)
        return ids


def by_assistant(messages: Any) -> bool:
    """Returns whether these are chat messages of which the assistant wrote the last."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _check_length(what: str, ids: Sequence[int], option: str, limit: int) -> None:
    if len(ids) > limit:
        raise TooLong(
            f"the {what} has {len(ids)} tokens, {option} is {limit}. Raise it, shorten the {what}, or set data.too_long=drop."
        )
