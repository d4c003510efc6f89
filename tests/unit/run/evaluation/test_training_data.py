"""What an evaluation found, as data to train on."""

import json
from pathlib import Path

import pytest

from rftmega.core.errors import ConfigError
from rftmega.core.types import Prompt
from rftmega.run.evaluation.training_data import (
    completions_in,
    kept,
    refuse_existing,
    scored,
    write,
)

LINES = [
    (0, "wrong", {"reward": 0.5, "exact_match": 0.0}, ""),
    (0, "right \N{GRINNING FACE}", {"reward": 1.5, "exact_match": 1.0}, ""),
    (1, "", {"reward": 1.0, "exact_match": 1.0}, ""),
    (1, "no", {"reward": -1.0, "exact_match": 0.0}, ""),
    (1, "", {}, "a tool failed"),
    (2, "", {}, "a tool failed"),
]


def prompts() -> dict[str, list[Prompt]]:
    records = [json.dumps({"prompt": f"p{i}", "level": i, "response": "old"}) for i in range(3)]
    return {"eval": [Prompt((i,), index=i, record=record) for i, record in enumerate(records)]}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    file = tmp_path / "completions.jsonl"
    with file.open("w") as opened:
        for index, response, scores, lost in LINES:
            line = {"set": "eval", "index": index, "response": response, "scores": scores}
            opened.write(json.dumps(line | {"lost": lost}) + "\n")
    return file


def test_right_completions_become_responses_of_their_records(stored: Path, tmp_path: Path) -> None:
    records = kept(prompts(), completions_in(stored), judge="exact_match", response_key="response")
    file = tmp_path / "new" / "sft.jsonl"
    assert write(file, records) == 1
    assert json.loads(file.read_text()) == {
        "prompt": "p0", "level": 0, "response": "right \N{GRINNING FACE}", "mean_score": 1.0,
    }  # fmt: skip


def test_prompts_get_the_mean_reward_of_their_completions(stored: Path) -> None:
    found = list(scored(prompts(), completions_in(stored)))
    assert [(each["prompt"], each["mean_score"]) for each in found] == [("p0", 1.0), ("p1", 0.0)]


def test_a_file_that_is_there_is_not_overwritten(stored: Path, tmp_path: Path) -> None:
    refuse_existing(None, tmp_path / "new.jsonl")
    with pytest.raises(ConfigError, match="exists already"):
        refuse_existing(None, stored)
