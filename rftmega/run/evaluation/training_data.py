"""Writes the results of an evaluation as training data: right completions, and mean scores of
prompts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftmega.core.errors import ConfigError
from rftmega.core.json_files import parse_json
from rftmega.core.types import Prompt
from rftmega.monitoring.observers.output_files import writing

RIGHT = 1.0  # a score from which on a completion is right
MEAN = "mean_score"  # column of the mean reward

Completions = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]


def completions_in(file: Path) -> Completions:
    """Returns (set, index of the prompt) -> the prompt's completions in an evaluation's file."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        each = parse_json(line)
        if not each["lost"]:
            found.setdefault((each["set"], each["index"]), []).append(each)
    return found


def kept(
    prompts: Mapping[str, Sequence[Prompt]], stored: Completions, *, judge: str, response_key: str
) -> Iterator[dict[str, Any]]:
    """Yields a record per right completion: the prompt's record, the completion under
    `response_key`, and the mean reward of the prompt's completions. Empty completions are left out,
    since nothing can be trained on them. `judge`: the reward component whose score decides whether
    a completion is right.
    """
    for record, completions in _records(prompts, stored):
        for each in completions:
            if each["scores"].get(judge, 0.0) >= RIGHT and each["response"]:
                yield record | {response_key: each["response"]}


def scored(
    prompts: Mapping[str, Sequence[Prompt]], stored: Completions
) -> Iterator[dict[str, Any]]:
    """Yields the record of each prompt with the mean reward of its completions."""
    return (record for record, _ in _records(prompts, stored))


def _records(
    prompts: Mapping[str, Sequence[Prompt]], stored: Completions
) -> Iterator[tuple[dict[str, Any], Sequence[Mapping[str, Any]]]]:
    for name, own in prompts.items():
        for prompt in own:
            completions = stored.get((name, prompt.index), ())
            if not completions:
                continue
            total = sum(each["scores"]["reward"] for each in completions)
            yield parse_json(prompt.record) | {MEAN: total / len(completions)}, completions


def write(file: Path, records: Iterator[dict[str, Any]]) -> int:
    """Writes records as JSON lines, and returns their number."""
    count = 0
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8") as opened:
            for record in records:
                opened.write(json.dumps(record, ensure_ascii=True) + "\n")
                count += 1
    return count


def refuse_existing(*files: Path | None) -> None:
    """Raises ConfigError for a file that would be overwritten."""
    for file in files:
        if file is not None and file.exists():
            raise ConfigError(f"{file} exists already. Give another file, or delete it.")
