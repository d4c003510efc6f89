"""A JSONL file of prompts and labels. Every line is checked before the first is used."""

import json
import logging
from pathlib import Path
from typing import Any

from rftmega.config import DataConfig
from rftmega.data.tokenizer import Tokenizer
from rftmega.errors import DataError
from rftmega.types import Prompt

log = logging.getLogger(__name__)
SHOWN_PROBLEMS = 10


def load_prompts(path: str | Path, tokenizer: Tokenizer, config: DataConfig, *, max_prompt_tokens: int) -> list[Prompt]:
    """One Prompt a line; blank lines are passed over.

    Raises DataError that lists file:line of what is not JSON, lacks a key, holds the wrong type or is too long.
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    dropped = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line, tokenizer, config, index=len(prompts))
        except DataError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        length = len(prompt.token_ids)
        if length <= max_prompt_tokens:
            prompts.append(prompt)
        elif config.too_long == "drop":
            dropped += 1
        else:
            problems.append(
                f"{path}:{number}: the prompt has {length} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}. "
                "Raise it, shorten the prompt, or set data.too_long=drop."
            )
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = problems[:SHOWN_PROBLEMS] + ([f"... and {more} more."] if more > 0 else [])
        raise DataError("\n".join(shown))
    if dropped:
        log.warning(
            "%s: dropped %d of %d prompts, longer than %d tokens",
            path,
            dropped,
            dropped + len(prompts),
            max_prompt_tokens,
        )
    if not prompts:
        raise DataError(f"{path} holds no usable prompt.")
    return prompts


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").split("\n")  # splitlines() would cut at U+2028, which JSON allows
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}.") from error


def _parse(line: str, tokenizer: Tokenizer, config: DataConfig, *, index: int) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg} at column {error.colno}).") from error
    if not isinstance(record, dict):
        raise DataError(f"a JSON {type(record).__name__}, not an object.")
    text, label = (
        _value(record, key, option)
        for key, option in ((config.prompt_key, "data.prompt_key"), (config.label_key, "data.label_key"))
    )
    if not isinstance(text, str | list) or not text:
        raise DataError(f'"{config.prompt_key}" must be a string or a list of chat messages, and not empty.')
    if not isinstance(label, str | int | float):
        raise DataError(f'"{config.label_key}" must be a string or a number, not {type(label).__name__}.')
    kind = record.get(config.kind_key, "")
    if not isinstance(kind, str):
        raise DataError(f'"{config.kind_key}" must be a string, not {type(kind).__name__} (the key is set by data.kind_key).')
    ids = tokenizer.encode(text, chat_template=config.chat_template)
    if not ids:
        raise DataError(f"the tokenizer makes no token of {text!r}.")
    return Prompt(ids, label=str(label), index=index, kind=kind)


def _value(record: dict[str, Any], key: str, option: str) -> Any:
    if key not in record:
        raise DataError(f'no "{key}" among the keys {sorted(record)} (the key is set by {option}).')
    return record[key]
