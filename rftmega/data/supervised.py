"""Supervised fine-tuning data: records with prompts and responses, converted to rows. Only the
response and its end token are trained on, not the prompt.

A record has a prompt under data.prompt_key and a response under data.response_key, or only a prompt
of chat messages that ends with an assistant message. If the conversation has several assistant
turns, only the last one is trained, or all of them with data.trained_turns=all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rftmega.config import DataConfig
from rftmega.core.errors import DataError
from rftmega.core.media_positions import Placed, RowImages
from rftmega.core.types import Rows
from rftmega.data.chat.media_parts import media_moved, refuse_places
from rftmega.data.chat.template_forms import Messages
from rftmega.data.encoder import Encoder, by_assistant
from rftmega.data.examples import load_examples, required
from rftmega.data.media_reader import TEXT_ONLY, MediaOptions, MediaReader
from rftmega.data.prompt_images import expanded_within
from rftmega.data.records import Record, value_at
from rftmega.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """Example holds the token ids of a prompt and of a response that ends in its end-of-sequence
    token. The response may consist of several assistant turns; `between`: the index ranges of the
    messages between these turns, which are not trained on. `images`: images, videos and waveforms
    with their positions in prompt and response.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    between: tuple[range, ...] = ()  # ranges of response_ids that are not trained on
    images: tuple[Placed, ...] = ()


def load_supervised(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    media: MediaOptions = TEXT_ONLY,
    places: list[str] | None = None,
    most: int | None = None,
) -> list[Example]:
    """Returns one Example per record of `source`. With data.trained_turns=all, a conversation gives
    several Examples if the chat template rewrites the text before a turn.

    `media`: the images, videos and waveforms that prompts may have. The location of each example in
    the file is appended to `places`. `most`: maximum number of records to read, None: all. Raises
    DataError as `load_prompts` does.
    """
    reader = media.reader(source, tokenizer, config, most)
    encoder = Encoder(
        tokenizer,
        config,
        max_prompt_tokens,
        max_response_tokens,
        placeholders=media.placeholders(tokenizer),
    )
    of_records: list[str] = []
    found = load_examples(
        source,
        partial(_parse, encoder, reader),
        too_long=config.too_long,
        noun="examples",
        places=of_records,
        report=encoder.report,
        most=most,
    )
    if places is not None:
        for where, examples in zip(of_records, found, strict=True):
            places += [where] * len(examples)
    return [example for of_record in found for example in of_record]


def rows_of(examples: Sequence[Example]) -> Rows:
    """Returns one row per example, padded with token 0. Messages between the turns of a response
    are masked.
    """
    width = max(len(example.prompt_ids) + len(example.response_ids) for example in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.int64)
    for row, example in enumerate(examples):
        ids = example.prompt_ids + example.response_ids
        tokens[row, : len(ids)] = torch.tensor(ids)
    prompt_lengths = torch.tensor([len(example.prompt_ids) for example in examples])
    rows = Rows.of_completions(
        tokens,
        prompt_lengths,
        prompt_lengths + torch.tensor([len(example.response_ids) for example in examples]),
    )
    for row, example in enumerate(examples):
        for places in example.between:
            first = len(example.prompt_ids) - 1  # the mask covers each token but the first
            rows.mask[row, first + places.start : first + places.stop] = False
    return replace(rows, images=RowImages.of(example.images for example in examples))


class RecordEncoder(NamedTuple):
    """RecordEncoder encodes the prompt and the responses of one record, whose media are `sources`."""

    encoder: Encoder
    reader: MediaReader
    sources: Any

    def example(self, prompt: Any, completion: Any, key: str, *, first: bool = False) -> Example:
        """Returns the Example of a prompt and the response to it. `key`: the record's key of the
        response, for error messages; `first`: the prompt is the beginning of the record's
        conversation, and may have only the first of its media.
        """
        encoder = self.encoder
        refuse_places(completion)
        prompt = self.reader.marked(prompt)
        ids, images = self.reader.placed(encoder.prompt(prompt), self.sources, first=first)
        expanded_within(ids, encoder.max_prompt_tokens, len(images))
        return Example(ids, encoder.completion(prompt, completion, key), images=images)


def _parse(encoder: Encoder, reader: MediaReader, record: Record, index: int) -> list[Example]:
    config, encoder = encoder.config, encoder.for_record(record)
    prompt, record = media_moved(encoder.given_prompt(record), record, config)
    of_record = RecordEncoder(encoder, reader, reader.sources(record))
    key = config.response_key
    if by_assistant(prompt):
        if value_at(record, key) is not None:
            raise DataError(
                f'"{config.prompt_key}" ends with an answer and "{key}" is another. Leave one out.'
            )
        prompt, completion, key = prompt[:-1], prompt[-1], config.prompt_key
        refuse_two_completions(prompt, config)
    else:
        completion = required(record, key, "data.response_key")
    if config.trained_turns == "all" and isinstance(prompt, list):
        return _turns(of_record, prompt, completion, key)
    return [of_record.example(prompt, completion, key)]


def _turns(of_record: RecordEncoder, prompt: Messages, completion: Any, key: str) -> list[Example]:
    """Returns all assistant turns of a conversation, `prompt` followed by the response
    `completion`, as examples. Turns share one Example as long as the chat template only appends
    text; a turn before which the template rewrites text (drops reasoning) begins a new Example.
    """
    rows: list[Example] = []
    asked = [
        place for place, message in enumerate(prompt) if place and message["role"] == "assistant"
    ]
    for place in [*asked, len(prompt)]:
        before, last = prompt[:place], place == len(prompt)
        refuse_two_completions(before, of_record.encoder.config)
        said = completion if last else prompt[place]
        turn = of_record.example(before, said, key, first=not last)
        joined = _joined(rows[-1], turn) if rows else None
        rows[-1:] = [joined] if joined else [*rows[-1:], turn]
    return rows


def _joined(row: Example, turn: Example) -> Example | None:
    """Returns the Example `row` extended by `turn`, a later assistant turn of the same
    conversation; None if the prompt of `turn` does not begin with the tokens of `row`.
    """
    ids = row.prompt_ids + row.response_ids
    if turn.prompt_ids[: len(ids)] != ids:
        return None
    between = range(len(row.response_ids), len(turn.prompt_ids) - len(row.prompt_ids))
    response = turn.prompt_ids[len(row.prompt_ids) :] + turn.response_ids
    return Example(row.prompt_ids, response, (*row.between, between), turn.images)


def refuse_two_completions(context: Any, config: DataConfig) -> None:
    """Raises DataError if the messages before a response already end with an assistant message."""
    if by_assistant(context):
        raise DataError(
            f'"{config.prompt_key}" has two messages of the assistant behind each other, and engines answer once. Join them to '
            "one message."
        )
