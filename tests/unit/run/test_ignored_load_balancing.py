"""A mixture's load-balancing loss that config.json asks for is told to be no part of the run."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import ModelConfig, RunConfig
from rftmega.run.ignored_load_balancing import tell_balancing
from rftmega.run.process import joined
from rftmega.runtime.parallel.process_group import World


def told(folder: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture, rank: int) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    config = RunConfig(model=ModelConfig(path=str(folder)))
    with caplog.at_level(logging.INFO, "rftmega"):
        tell_balancing(World(rank, 2, rank, 2, torch.device("cpu")), config)
    return caplog.text


@pytest.mark.parametrize(
    "fields",
    [{"router_aux_loss_coef": 0.5}, {"text_config": {"router_aux_loss_coef": 0.5}}],
)
def test_a_coefficient_that_is_not_used_is_told_once(
    fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "router_aux_loss_coef=0.5; this run trains with 0" in told(tmp_path, fields, caplog, 0)
    assert len(caplog.records) == 1
    caplog.clear()
    assert told(tmp_path, fields, caplog, 1) == ""


@pytest.mark.parametrize(
    "fields", [{}, {"router_aux_loss_coef": 0}, {"router_aux_loss_coef": None}, {"text_config": 7}]
)
def test_nothing_is_told_of_a_model_that_asks_for_nothing(
    fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(tmp_path, fields, caplog, 0) == ""


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_tells_it_on_both_backends(
    backend: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"router_aux_loss_coef": 0.5}))
    config = RunConfig(model=ModelConfig(path=str(tmp_path)), backend=backend)
    config.trainer.output = str(tmp_path / "out")
    monkeypatch.setattr("rftmega.run.process.nodes.check_nodes", lambda world, needed: None)
    monkeypatch.setattr("rftmega.run.process.disk_space.needed", lambda config: {})
    with caplog.at_level(logging.INFO, "rftmega"), joined(config):
        pass
    assert caplog.text.count("router_aux_loss_coef=0.5; this run trains with 0") == 1
