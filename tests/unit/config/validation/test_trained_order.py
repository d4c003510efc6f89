"""A record that a run can't take is refused before anything is built."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import RunConfig
from rftmega.config.validation.asynchronous import asynchronous
from rftmega.config.validation.trained_order import trained_order

SIZES = {"prompts_per_step": 4, "max_staleness": 2}
STEP = {"step": 3, "taken": [[7, 8, 5, 6]], "versions": [[[2], [1, 2], [2], [2]]], "dropped": [1]}


def config_of(order: str, *, most: int = 2, ahead: int = 0) -> RunConfig:
    config = RunConfig()
    config.strategy = "separate"
    config.rollout.order, config.rollout.ahead = order, ahead
    config.trainer.max_staleness, config.trainer.prompts_per_step = most, 4
    return config


def said(folder: Path, *steps: Any) -> str:
    path = folder / "given.jsonl"
    path.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    found = trained_order(config_of(str(path)))
    assert len(found) <= 1
    return "".join(found)


def test_a_whole_record_of_the_same_sizes_is_taken(tmp_path: Path) -> None:
    again = STEP | {"step": 4, "taken": [[9, 10], [11, 12]], "versions": [[[3], [3]], [[3], []]]}
    assert said(tmp_path, STEP | SIZES, again | SIZES) == ""
    assert trained_order(config_of("")) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompts_per_step": 5}, "trainer.prompts_per_step=5, and this one has 4"),
        ({"max_staleness": 1}, "trainer.max_staleness=1, and this one has 2"),
        ({"taken": []}, "has no groups of a step"),
        ({"taken": [[]], "versions": [[]]}, "has no groups of a step"),
        ({"versions": [[[2]]]}, "has no groups of a step"),
        ({"dropped": None}, "has no groups of a step"),
        ({"taken": [["7", 8, 5, 6]]}, "has no groups of a step"),
        ({"step": "3"}, "has no groups of a step"),
        ({"step": 5}, "is of step 5, behind one of step 3"),
        ({"step": 3}, "is of step 3, behind one of step 3"),
    ],
)
def test_a_line_that_does_not_fit_is_named_with_its_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    found = said(tmp_path, STEP | SIZES, STEP | SIZES | {"step": 4} | change)
    assert reason in found


def test_what_is_no_record_at_all_is_refused(tmp_path: Path) -> None:
    assert "is no file" in trained_order(config_of(str(tmp_path / "none.jsonl")))[0]
    assert "is empty" in said(tmp_path)
    path = tmp_path / "half.jsonl"
    path.write_text(json.dumps(STEP | SIZES) + '\n{"step": 4, "ta')
    assert f"{path}:2: not JSON" in trained_order(config_of(str(path)))[0]
    own = config_of(str(tmp_path / "trained_order.jsonl"))
    own.trainer.output = f"{tmp_path}/other/.."
    (tmp_path / "other").mkdir()
    (tmp_path / "trained_order.jsonl").write_text(json.dumps(STEP | SIZES))
    assert "is what this run writes itself" in trained_order(own)[0]


@pytest.mark.parametrize(("most", "ahead"), [(0, 0), (1, 1)])
def test_a_run_whose_order_is_the_same_anyway_takes_none(most: int, ahead: int) -> None:
    assert asynchronous(config_of("", most=most, ahead=ahead)) == []
    (found,) = asynchronous(config_of("x", most=most, ahead=ahead))
    assert found.startswith("rollout.order=x needs trainer.max_staleness above 0")
    assert asynchronous(config_of("x")) == []
