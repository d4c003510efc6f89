"""Records of prompts and the answers to learn -> rows. What is learnt is the answer and its end,
nothing of the prompt.

A record has data.prompt_key and data.response_key; or the prompt is chat messages that end with the
assistant's, and then that one alone is learnt: what the assistant said earlier belongs to the
prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rftmega.config import DataConfig
from rftmega.data.encoder import Encoder, by_assistant
from rftmega.data.examples import load_examples, required
from rftmega.data.sources import refuse_media
from rftmega.data.tokenizer import Tokenizer
from rftmega.errors import DataError
from rftmega.records import Record
from rftmega.types import Rows


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and an answer to it, which ends in its end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


def load_supervised(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    most: int | None = None,
) -> list[Example]:
    """Reads one Example a record.

    `most`: records that are read, None: all. Raises DataError as `load_prompts` does.
    """
    parse = partial(_parse, Encoder(tokenizer, config, max_prompt_tokens, max_response_tokens))
    return load_examples(source, parse, too_long=config.too_long, noun="examples", most=most)


def rows_of(examples: Sequence[Example]) -> Rows:
    """Lays out one row an example; 0 behind its end, which nothing reads."""
    width = max(len(example.prompt_ids) + len(example.response_ids) for example in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.int64)
    for row, example in enumerate(examples):
        ids = example.prompt_ids + example.response_ids
        tokens[row, : len(ids)] = torch.tensor(ids)
    prompt_lengths = torch.tensor([len(example.prompt_ids) for example in examples])
    return Rows.of_answers(
        tokens,
        prompt_lengths,
        prompt_lengths + torch.tensor([len(example.response_ids) for example in examples]),
    )


def _parse(encoder: Encoder, record: Record, index: int) -> Example:
    config = encoder.config
    refuse_media(record, config)
    prompt = required(record, config.prompt_key, "data.prompt_key")
    key = config.response_key
    if by_assistant(prompt):
        if record.get(key) is not None:
            raise DataError(
                f'"{config.prompt_key}" ends with an answer and "{key}" is another. Leave one out.'
            )
        prompt, answer, key = prompt[:-1], prompt[-1:], config.prompt_key
    else:
        answer = required(record, key, "data.response_key")
    ids = encoder.prompt(prompt)
    return Example(ids, encoder.answer(prompt, answer, key))
