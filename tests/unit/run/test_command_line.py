"""Which folders a run keeps others out of, and which of its processes does."""

import os
from pathlib import Path

import pytest

from rftmega.config import CheckpointConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.core.errors import LockedError
from rftmega.run.api import folders_locked
from rftmega.runtime.parallel.folder_lock import FILE


def config_of(output: Path, checkpoints: Path | str = "", every: int = 2) -> RunConfig:
    return RunConfig(
        trainer=TrainerConfig(output=str(output)),
        checkpoint=CheckpointConfig(every=every, folder=str(checkpoints)),
    )


def test_a_run_keeps_others_out_of_its_output_and_of_its_checkpoints(tmp_path: Path) -> None:
    output, checkpoints = tmp_path / "out", tmp_path / "elsewhere"
    with folders_locked(config_of(output, checkpoints)):
        for other in (
            config_of(output),
            config_of(tmp_path / "other", checkpoints),
            config_of(output / ".." / "out"),
        ):
            with (
                pytest.raises(LockedError, match=f"process {os.getpid()} on"),
                folders_locked(other),
            ):
                pass
        # it saves nothing there
        with folders_locked(config_of(tmp_path / "other", checkpoints, every=0)):
            pass
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_push_into_one_folder(tmp_path: Path) -> None:
    def pushing(output: str, strategy: str = "separate") -> RunConfig:
        config = config_of(tmp_path / output)
        config.strategy = strategy  # type: ignore[assignment]
        config.rollout = RolloutConfig(weights_folder=str(tmp_path / "weights"))
        return config

    with folders_locked(pushing("a")):
        with (
            pytest.raises(LockedError, match="weights is in use by another run"),
            folders_locked(pushing("b")),
        ):
            pass
        with folders_locked(pushing("b", "colocated")):
            pass


def test_without_a_launcher_the_first_rank_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with folders_locked(config_of(tmp_path)):
        monkeypatch.setenv("RANK", "1")
        with folders_locked(config_of(tmp_path)):
            assert (tmp_path / FILE).is_file()
        assert (tmp_path / FILE).is_file()
