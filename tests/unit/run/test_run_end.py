"""What a run does at its end is tried before it begins."""

from importlib import metadata
from pathlib import Path

import pytest

from rftmega.config import CheckpointConfig, RunConfig, TrainerConfig
from rftmega.run import run_end


def config_of(folder: Path, **trainer: object) -> RunConfig:
    return RunConfig(trainer=TrainerConfig(output=str(folder / "run"), **trainer))  # type: ignore[arg-type]


def test_a_run_that_can_end_well_is_let_through_and_nothing_is_left_behind(tmp_path: Path) -> None:
    config = config_of(tmp_path, push_to_hub="org/mine")
    config.checkpoint = CheckpointConfig(every=1, folder=str(tmp_path / "a/b/c"))
    assert run_end.refusals(config) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["trainer.output", "checkpoint.folder"])
def test_a_folder_that_can_not_be_written_is_told_by_its_option(
    option: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    config = config_of(tmp_path)
    if option == "trainer.output":
        config.trainer.output = str(tmp_path / "file/run")
    else:
        config.checkpoint = CheckpointConfig(every=1, folder=str(tmp_path / "file/kept"))
    (said,) = run_end.refusals(config)
    assert said.startswith(f"{option}={tmp_path}/file/")
    assert f"can't be written: {tmp_path}/file is no folder" in said


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_end.tempfile, "TemporaryFile", full)
    (said,) = run_end.refusals(config_of(tmp_path))
    assert f"can't be written: {tmp_path}: Read-only file system" in said


def test_a_name_that_the_hub_does_not_take_is_told(tmp_path: Path) -> None:
    (said,) = run_end.refusals(config_of(tmp_path, push_to_hub="org/mine--yours"))
    assert said.startswith("trainer.push_to_hub=org/mine--yours is no name of a repository: ")


def test_a_model_card_that_can_not_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise ValueError("cannot represent an object")

    monkeypatch.setattr(run_end, "model_card", broken)
    (said,) = run_end.refusals(config_of(tmp_path))
    assert "the model card can't be written: ValueError: cannot represent an object" in said
    assert run_end.refusals(config_of(tmp_path, export=False)) == []


def test_a_run_from_sources_that_are_not_installed_is_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> object:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", not_installed)
    assert run_end.refusals(config_of(tmp_path)) == []


@pytest.mark.parametrize("name", ["policy_adapter", "policy_ema.incomplete"])
def test_what_is_in_the_way_of_an_export_is_told(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.model.lora.rank, config.algorithm.ema_beta = 2, 0.5
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / name / "thesis").write_text("years")
    (said,) = run_end.refusals(config)
    assert said.startswith(f"{tmp_path}/run/{name} is there, and no export made it")
