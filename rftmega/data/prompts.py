"""Records of prompts and labels -> Prompts."""

from functools import partial
from pathlib import Path

from rftmega.config import DataConfig
from rftmega.data.examples import check_length, load_examples, required, text_or_messages
from rftmega.data.records import Record
from rftmega.data.tokenizer import Tokenizer
from rftmega.errors import DataError
from rftmega.types import Prompt


def load_prompts(source: str | Path, tokenizer: Tokenizer, config: DataConfig, *, max_prompt_tokens: int) -> list[Prompt]:
    """One Prompt a record.

    Raises DataError that lists where a record can't be read, lacks a key, holds the wrong type or is too long.
    """
    parse = partial(_parse, tokenizer, config, max_prompt_tokens)
    return load_examples(source, parse, too_long=config.too_long, noun="prompts")


def prompt_ids(record: Record, tokenizer: Tokenizer, config: DataConfig, *, max_prompt_tokens: int) -> tuple[int, ...]:
    """Token ids of the record's prompt. Raises DataError, or TooLong."""
    text = text_or_messages(required(record, config.prompt_key, "data.prompt_key"), config.prompt_key)
    ids = tokenizer.encode(text, chat_template=config.chat_template)
    if not ids:
        raise DataError(f"the tokenizer makes no token of {text!r}.")
    check_length("prompt", ids, "rollout.max_prompt_tokens", max_prompt_tokens)
    return ids


def _parse(tokenizer: Tokenizer, config: DataConfig, max_prompt_tokens: int, record: Record, index: int) -> Prompt:
    label = required(record, config.label_key, "data.label_key")
    if not isinstance(label, str | int | float):
        raise DataError(f'"{config.label_key}" must be a string or a number, not {type(label).__name__}.')
    ids = prompt_ids(record, tokenizer, config, max_prompt_tokens=max_prompt_tokens)
    return Prompt(ids, label=str(label), index=index)
