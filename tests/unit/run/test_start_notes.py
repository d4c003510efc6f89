"""What a run says at its start of dropout in config.json, of bfloat16 on a CPU, and of staleness."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import ModelConfig, RunConfig
from rftmega.config.options.algorithms import NoImportance, TokenImportance
from rftmega.run import start_notes
from rftmega.runtime.device import cpu_speed


def told(
    folder: Path, caplog: pytest.LogCaptureFixture, *, dtype: str = "float32", **fields: object
) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | fields))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        start_notes.tell(RunConfig(model=ModelConfig(path=str(folder), dtype=dtype, dropout=0.2)))
    return caplog.text


def test_dropout_of_config_json_is_told_with_what_acts_instead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = told(tmp_path, caplog, attention_dropout=0.1, vision_config={"drop_path_rate": 0.5})
    assert "attention_dropout=0.1, vision_config.drop_path_rate=0.5" in said
    assert "model.dropout=0.2" in said
    assert told(tmp_path, caplog, attention_dropout=0.0) == ""


def test_bfloat16_on_a_slow_processor_is_told_with_its_ratio(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_notes, "bfloat16_ratio", lambda: 6.04)
    said = told(tmp_path, caplog, dtype="bfloat16")
    assert "bfloat16 take 6.0 times as long as in float32" in said
    assert "Set model.dtype=float32" in said
    assert told(tmp_path, caplog) == "", "float32 was measured for nothing"
    monkeypatch.setattr(start_notes, "bfloat16_ratio", lambda: 0.6)
    said = told(tmp_path, caplog, dtype="bfloat16")
    assert "0.6 times" in said and "model.dtype" not in said


def test_the_ratio_is_of_the_times_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {torch.bfloat16: 6.0, torch.float32: 2.0}
    now, products = [0.0], []

    def product(left: torch.Tensor, right: torch.Tensor) -> None:
        products.append(left.dtype)
        now[0] += cost[left.dtype]

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert cpu_speed.bfloat16_ratio(100.0) == 3.0
    assert products.count(torch.float32) > products.count(torch.bfloat16) > 2


def test_a_measurement_takes_little_time_and_is_a_positive_number() -> None:
    assert cpu_speed.bfloat16_ratio(0.01) > 0


@pytest.mark.parametrize(
    ("stale", "correction", "told"),
    [(0, NoImportance(), False), (4, NoImportance(), True), (4, TokenImportance(), False)],
)
def test_old_completions_without_importance_sampling_are_told_once_at_the_start(
    stale: int, correction: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig()
    config.trainer.max_staleness = stale
    config.algorithm.importance_sampling = correction
    start_notes.tell(config)
    said = [each for each in caplog.messages if "trainer.max_staleness=4" in each]
    assert len(said) == told
    assert all("algorithm.importance_sampling.type=token" in each for each in said)
