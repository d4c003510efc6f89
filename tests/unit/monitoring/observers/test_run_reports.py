"""The console tells what a user would otherwise have to look up."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from rftmega.config import RunConfig
from rftmega.monitoring.observers.assemble import writers
from rftmega.monitoring.observers.run_reports import RunReports


def told(folder: Path) -> RunReports:
    config = RunConfig()
    config.trainer.output, config.trainer.steps = str(folder), 9
    (found,) = [each for each in writers(config, []) if isinstance(each, RunReports)]
    return found


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_run_that_is_complete_says_so_and_how_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "policy").mkdir()
    for step, resumed in ((8, True), (9, False)):
        told(tmp_path).on_start(SimpleNamespace(step=step, resumed=resumed), {})
    assert caplog.text == ""
    told(tmp_path).on_start(SimpleNamespace(step=9, resumed=True), {})
    for text in (
        "complete",
        "Raise trainer.steps",
        "checkpoint.resume=none",
        f"in {tmp_path}/policy",
    ):
        assert text in caplog.text


def test_a_run_that_was_stopped_says_where_it_is_and_how_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told(tmp_path).on_end(SimpleNamespace(step=9, stopped=False))
    assert caplog.text == ""
    told(tmp_path).on_end(SimpleNamespace(step=4, stopped=True))
    assert f"after step 4 of 9, and saved in {tmp_path}/checkpoints (exit code 75)" in caplog.text
    assert f"rftmega convert to-hf {tmp_path}/checkpoints OUT" in caplog.text


def test_a_step_that_was_skipped_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports = told(tmp_path)
    reports.on_step(SimpleNamespace(step=3), {"skipped_steps": 0.0, "optimizer_steps": 2.0})
    assert caplog.text == ""
    reports.on_step(SimpleNamespace(step=4), {"skipped_steps": 1.0, "optimizer_steps": 1.0})
    reports.on_step(SimpleNamespace(step=5), {"critic_skipped_steps": 2.0, "skipped_steps": 0.0})
    assert "step 4: 1 of 2 optimizer steps of the model were skipped" in caplog.text
    assert "step 5: 2 of 2 optimizer steps of the critic were skipped" in caplog.text
