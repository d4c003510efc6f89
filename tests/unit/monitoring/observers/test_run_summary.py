"""Every run ends with what it reached, where that is, and how to look at it."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rftmega.config import RunConfig
from rftmega.monitoring.observers.run_summary import RunSummary

LINES = [
    {"step": 0, "time": 1.0, "eval_a_math": 0.25, "eval_b_math": 0.5},
    {"step": 1, "time": 2.0, "reward": 0.1, "seconds_rollout": 2.0, "logprob_gap_max": 0.25},
    {"step": 2, "time": 3.0, "reward": None, "seconds_rollout": 4.0, "logprob_gap_max": 0.125},
    {"step": 3, "time": 4.0, "reward": 0.7, "seconds_rollout": 6.0, "eval_a_math": 0.75},
]


def reported(folder: Path, lines: list[dict[str, Any]], **options: str) -> RunSummary:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = RunConfig()
    config.trainer.output, config.trainer.eval_accuracy = str(folder), "math"
    for name, value in options.items():
        setattr(config.trainer, name, value)
    return RunSummary(config, ["a", "b"])


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_run_ends_with_ten_lines_a_summary_and_a_curve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "policy").mkdir()
    reported(tmp_path, LINES).on_end(SimpleNamespace(stopped=False))
    (record,) = caplog.records
    lines = record.getMessage().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("Run finished         3 of 100 steps, 0:00:0")
    assert lines[1] == "reward               0.1 (step 1) -> 0.7 (step 3)"
    assert lines[2].endswith(
        "accuracy of a 25.0% (step 0) -> 75.0% (step 3), accuracy of b 50.0% (step 0)"
    )
    assert lines[3] == "time of a step       rollout 4 s"
    assert lines[4] == f"model                {tmp_path}/policy"
    assert f"view {tmp_path}" not in record.getMessage(), "there are no trajectories"
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["ended"], found["steps"], found["logprob_gap_max"]) == ("finished", 3, 0.25)
    assert found["reward"] == {"first_step": 1, "first": 0.1, "last_step": 3, "last": 0.7}
    assert found["evaluation"]["eval_a_math"]["last"] == 0.75
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_graded_reward_has_a_mean_score_and_no_accuracy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [LINES[0] | {"eval_a_mine": 0.25}, *LINES[1:]]
    reported(tmp_path, lines, eval_accuracy="mine").on_end(SimpleNamespace(stopped=False))
    assert "mean score of a 0.25 (step 0)" in caplog.text
    assert "accuracy" not in caplog.text


def test_a_failed_run_is_reported_and_one_without_a_step_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reported(tmp_path, LINES[:1]).on_failed(SimpleNamespace())
    assert not caplog.records
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories/step_000001.jsonl.gz").touch()
    reported(tmp_path, LINES).on_failed(SimpleNamespace())
    assert "Run failed" in caplog.text
    assert f"rftmega view {tmp_path}, which writes trajectories.html" in caplog.text
