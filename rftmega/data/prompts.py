"""Loading of prompts and labels from records."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from rftmega.config import DataConfig
from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import DataError
from rftmega.core.json_files import NotJSON, parse_json
from rftmega.core.types import Prompt, Taught
from rftmega.data.chat.media_parts import media_moved
from rftmega.data.encoder import Encoder, check_continued
from rftmega.data.examples import load_examples, required
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.data.media_reader import MediaOptions, MediaReader
from rftmega.data.prompt_images import expanded_within
from rftmega.data.records import Record, value_at
from rftmega.data.sources import without_contents
from rftmega.data.tokenizer import Tokenizer

LONGEST_SHOWN = 1000  # characters of a column that only people read
TESTS = ("tests", "inputs", "test_cases")  # keys of a label of the code reward


def load_prompts(
    source: str | Path,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompt_tokens: int,
    columns: bool = False,
    shown: bool = False,
    processor: ImageProcessor | AudioProcessor | None = None,
    max_images: int = 0,
    max_videos: int = 0,
    places: list[str] | None = None,
    most: int | None = None,
    teachers: Sequence[Teacher] = (),
) -> list[Prompt]:
    """Returns one Prompt per record of `source`. `columns`: each Prompt also keeps its record's
    columns as JSON. `shown`: without `columns`, each Prompt keeps a copy of the columns for
    display, with texts cut to LONGEST_SHOWN characters.

    `processor`: of a vision-language model, whose prompts may have `max_images` images and
    `max_videos` videos, or of an audio-language model, whose prompts may have `max_images`
    waveforms. The location of each prompt in the file is appended to `places`. `most`: maximum
    number of records to read, None: all. `teachers`: the options of the teachers, whose prompts and
    gates are read from columns of the records.

    Raises DataError that lists the records that can't be read, lack a key, hold a wrong type or are
    too long.
    """
    media = MediaOptions(processor, max_images, max_videos)
    reader = media.reader(source, tokenizer, config, most)
    encoder = Encoder(
        tokenizer, config, max_prompt_tokens, placeholders=media.placeholders(tokenizer)
    )
    return load_examples(
        source,
        partial(_parse, encoder, columns, shown, reader, teachers),
        too_long=config.too_long,
        noun="prompts",
        places=places,
        report=encoder.report,
        most=most,
    )


def _parse(
    encoder: Encoder,
    columns: bool,
    shown: bool,
    reader: MediaReader,
    teachers: Sequence[Teacher],
    record: Record,
    index: int,
) -> Prompt:
    config = encoder.config
    label = required(record, config.label_key, "data.label_key") if config.label_key else ""
    label = _as_json(label) if _is_tests(label) else label
    label = _with_function(label, record)
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(
            f'"{config.label_key}" must be a string or a number, not {type(label).__name__}.'
        )
    if isinstance(label, float) and not math.isfinite(label):
        raise DataError(
            f'"{config.label_key}" is {label}: no answer equals it. Leave the record out, or write what is meant.'
        )
    kind = value_at(record, config.kind_key, "")
    if not isinstance(kind, str):
        raise DataError(
            f'"{config.kind_key}" must be a string, not {type(kind).__name__} (the key is set by data.kind_key).'
        )
    text, record = media_moved(encoder.given_prompt(record), record, config)
    check_continued(text, config)
    sources = reader.sources(record)
    ids = encoder.prompt(reader.marked(text))
    ids, images = reader.placed(ids, sources)
    expanded_within(ids, encoder.max_prompt_tokens, len(images))
    kept = ""
    if columns:
        kept = _columns(text, without_contents(record, config), config)
    elif shown:
        kept = _shown_columns(text, without_contents(record, config))
    taught: tuple[Taught | None, ...] = ()
    if any(teacher.reads_columns for teacher in teachers):
        taught = tuple(_taught(encoder, record, teacher) for teacher in teachers)
    return Prompt(
        ids,
        label=str(label),
        index=index,
        kind=kind,
        record=kept,
        images=images,
        teachers=taught,
    )


def _taught(encoder: Encoder, record: Record, teacher: Teacher) -> Taught | None:
    """Returns a teacher's own prompt and gate from a record; None if `teacher.when` excludes the
    record.
    """
    given = {key: required(record, key, "algorithm.teachers[].when") for key in teacher.when}
    if any(str(given[key]) != value for key, value in teacher.when.items()):
        return None
    gate = _gate(record, teacher.gate) if teacher.gate else None
    if not teacher.prompt:
        return Taught(gate=gate)
    config = replace(encoder.config, prompt_key=teacher.prompt)
    longest = encoder.max_prompt_tokens if teacher.probes else sys.maxsize  # engines get them
    own = replace(encoder, config=config, max_prompt_tokens=longest)
    return Taught(own.prompt(own.given_prompt(record)), gate)


def _gate(record: Record, key: str) -> float:
    score = required(record, key, "algorithm.teachers[].gate")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise DataError(
            f'"{key}" must be a number, the mean score of the teacher on the prompt, not {str(score)[:40]!r} (the key is set by '
            "algorithm.teachers[].gate). `rftmega evaluate --keep` gives a teacher's scores."
        )
    return float(score)


def _columns(prompt: Any, record: Record, config: DataConfig) -> str:
    """Returns a record's columns as JSON; adds the columns that data.columns names, and the prompt."""
    named = {
        name: required(record, key, f"data.columns.{name}") for name, key in config.columns.items()
    }
    return _as_json({**record, **named, "prompt": prompt})


def _shown_columns(prompt: Any, record: Record) -> str:
    """Returns a record's columns as JSON for display. The prompt is kept whole. Any other value
    that has more than LONGEST_SHOWN characters, or a type that JSON lacks, becomes text cut to this
    length.
    """
    columns = {name: _shown(value) for name, value in record.items()}
    return json.dumps({**columns, "prompt": prompt}, default=str)


def _shown(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} [...]"


def _is_tests(label: Any) -> bool:
    """Returns whether a label may be the tests of a program (reward.code) as objects, not as JSON."""
    if isinstance(label, list):
        return bool(label) and all(isinstance(each, dict) and "input" in each for each in label)
    return isinstance(label, dict) and not label.keys().isdisjoint(TESTS)


def _with_function(label: Any, record: Record) -> Any:
    """Adds the name of the tested function to a label that is the JSON text of tests. LiveCodeBench
    gives this name in the record's `metadata` only. Returns any other label unchanged.
    """
    known = _parsed(record.get("metadata"))
    name = known.get("func_name") if isinstance(known, dict) else None
    if not isinstance(name, str) or not isinstance(label, str):
        return label
    tests = _parsed(label)
    if not isinstance(tests, list) or not _is_tests(tests):
        return label
    return _as_json([_named(test, name) for test in tests])


def _named(test: dict[str, Any], name: str) -> dict[str, Any]:
    calls = test.get("testtype") == "functional"
    return {"fn_name": name, **test} if calls and not test.get("metadata") else test


def _parsed(value: Any) -> Any:
    """Returns the value of a JSON text; None if it is no JSON; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except NotJSON:
        return None


def _as_json(record: Any) -> str:
    """Returns a record or a part of it as JSON; converts dates, times and decimals to text. Raises DataError for a
    value of another type that JSON lacks.
    """

    def text_of(value: Any) -> str:
        if isinstance(value, date | time | timedelta | Decimal):  # datetime is a date
            return str(value)
        raise DataError(
            f"a column holds {type(value).__name__}: reward functions are given numbers, text, lists and dictionaries. Leave "
            "the column out."
        )

    return json.dumps(record, default=text_of)
