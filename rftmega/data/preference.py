"""Records of prompts, each with a better and a worse answer -> pairs of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rftmega.config import DataConfig
from rftmega.data.encoder import Encoder
from rftmega.data.examples import load_examples, required
from rftmega.data.sources import refuse_media
from rftmega.data.supervised import Example, rows_of
from rftmega.data.tokenizer import Tokenizer
from rftmega.records import Record
from rftmega.types import Rows


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example


def load_preferences(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    most: int | None = None,
) -> list[Pair]:
    """Reads one Pair a record.

    `most`: records that are read, None: all. Raises DataError as `load_prompts` does.
    """
    parse = partial(_parse, Encoder(tokenizer, config, max_prompt_tokens, max_response_tokens))
    return load_examples(source, parse, too_long=config.too_long, noun="pairs", most=most)


def pair_rows(pairs: Sequence[Pair]) -> Rows:
    """Lays out rows 2i (chosen) and 2i + 1 (rejected), with a place for the score behind each (see
    `Rows.with_end`).
    """
    return rows_of(
        [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    ).with_end()


def _parse(encoder: Encoder, record: Record, index: int) -> Pair:
    config = encoder.config
    refuse_media(record, config)
    prompt = required(record, config.prompt_key, "data.prompt_key")
    chosen = required(record, config.chosen_key, "data.chosen_key")
    rejected = required(record, config.rejected_key, "data.rejected_key")
    ids = encoder.prompt(prompt)
    return Pair(
        Example(ids, encoder.answer(prompt, chosen, config.chosen_key)),
        Example(ids, encoder.answer(prompt, rejected, config.rejected_key)),
    )
