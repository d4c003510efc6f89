"""What `rftmega train --elastic` refuses, and the layouts that it finds."""

import json
import sys
from pathlib import Path

import pytest

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError, RFTMegaError
from rftmega.run import command_line
from rftmega.run.elastic.decision import NodeLimits
from rftmega.run.elastic.layout_choice import (
    Layouts,
    choose_layouts,
    layout_of,
    read_layouts,
)
from rftmega.run.elastic.start import elastic, limits_of, refusals
from rftmega.run.elastic.supervisor import digest
from tests.tiny_models import save_tiny


def config_of(tmp_path: Path, *options: str) -> RunConfig:
    if not (tmp_path / "model").exists():
        save_tiny(tmp_path / "model", "qwen3")
        (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a", "label": "b"}) + "\n")
    found: RunConfig = configuration.load(
        {
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "train.jsonl")},
            "rollout": {"engine": "scripted", "max_prompt_tokens": 8, "max_response_tokens": 6},
            "trainer": {"prompts_per_step": 4, "output": str(tmp_path / "out")},
        },
        ["checkpoint.every=2", *options],
    )
    return found


@pytest.mark.parametrize("text", ["", "2", "3:2", "0:4", "a:b", "2:", "-1:2", "1:2:3", "1.5:2"])
def test_numbers_of_nodes_are_a_range(text: str) -> None:
    assert limits_of(" 2:4 ") == NodeLimits(2, 4)
    with pytest.raises(ConfigError, match="as 2:4"):
        limits_of(text)


@pytest.mark.parametrize(
    ("options", "processes", "said"),
    [
        (["checkpoint.every=0"], 2, "checkpoint.every"),
        (["checkpoint.resume=none"], 2, "checkpoint.resume"),
        (["faults.max_restarts=2"], 2, "faults.max_restarts"),
        (["strategy=separate", "rollout.engine=vllm"], 2, "rollout.server_list"),
        ([], None, "--processes"),
        ([], 0, "--processes"),
    ],
)
def test_what_an_elastic_run_can_not_be_is_refused_with_a_remedy(
    options: list[str], processes: int | None, said: str, tmp_path: Path
) -> None:
    (found,) = refusals(config_of(tmp_path, *options), processes)
    assert said in found
    assert not refusals(config_of(tmp_path), 2)


@pytest.mark.parametrize("lease", [1.0, 0.0, -3.0, float("nan")])
def test_a_lease_that_is_too_short_is_refused(lease: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lease-seconds"):
        elastic(tmp_path / "run.yaml", [], 1, "1:2", lease=lease)


def test_the_layout_of_the_config_is_kept_where_it_works_and_replaced_where_not(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "parallel.tensor=2", "parallel.pipeline=2")
    assert layout_of(config, 4, 2) == {}
    for world in (1, 2):
        changes = layout_of(config, world, 1)
        tensor = changes.get("parallel.tensor", 2)
        assert tensor * changes.get("parallel.pipeline", 2) <= world


def test_layouts_are_found_for_each_number_of_nodes_or_the_reason_why_not(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rollout.max_response_tokens=100000")
    file = tmp_path / "layouts.json"
    choose_layouts(config, [1], 1, file)
    found = read_layouts(file)
    assert "max_position_embeddings" in str(found[1])
    choose_layouts(config_of(tmp_path), [2], 1, file)
    assert read_layouts(file) == {1: found[1], 2: {}}


def test_as_many_nodes_take_part_as_there_is_a_layout_for(tmp_path: Path) -> None:
    file = tmp_path / "layouts.json"
    layouts = Layouts(config_of(tmp_path), NodeLimits(2, 4), 1, file)
    assert layouts.known(4) == 0
    file.write_text(json.dumps({"4": "no", "3": {"parallel.tensor": 3}, "2": {}}))
    assert layouts.known(4) == layouts.known(3) == 3 and layouts.known(2) == 2
    assert layouts.best(4) == (3, {"parallel.tensor": 3})
    assert layouts.best(2) == (2, {})
    nothing = Layouts(config_of(tmp_path), NodeLimits(4, 4), 1, tmp_path / "others.json")
    (tmp_path / "others.json").write_text(json.dumps({"4": "it does not fit"}))
    with pytest.raises(RFTMegaError, match="it does not fit"):
        nothing.best(4)
    layouts.close()
    assert not file.exists()


def test_nodes_tell_configs_apart_by_every_option(tmp_path: Path) -> None:
    one = digest(config_of(tmp_path))
    assert one == digest(config_of(tmp_path))
    assert one != digest(config_of(tmp_path, "trainer.seed=1"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--node", "a"], "are for elastic runs. Give --elastic MIN:MAX"),
        (["--lease-seconds", "5"], "are for elastic runs. Give --elastic MIN:MAX"),
        (["--elastic", "2", "--dry-run"], "as 2:4"),
        (["--elastic", "1:2", "--dry-run"], "--elastic needs --processes"),
    ],
)
def test_options_of_elastic_runs_are_read_or_refused(
    given: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config_of(tmp_path)
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}")
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path / "run.yaml"), *given])
    assert command_line.run("") == 2
    assert said in capsys.readouterr().err
