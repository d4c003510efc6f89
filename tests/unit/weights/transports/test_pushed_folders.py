"""Folders of pushes: a run removes its own, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from rftmega.weights.transports import pushed_folders
from rftmega.weights.transports.checkpoint_weights import CheckpointWeights
from rftmega.weights.transports.disk_weights import DiskWeights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which others have files, too."""
    (tmp_path / "version-1.0-production").mkdir()
    (tmp_path / "version-1.0-production/model.safetensors").write_bytes(b"the user's")
    for name, run in (("version-40", "another"), ("version-3-another", "another")):
        (tmp_path / name).mkdir()
        pushed_folders.mark(tmp_path / name, run)
    (tmp_path / "version-9-own").mkdir()  # by its name alone
    (tmp_path / "version-link").symlink_to(tmp_path / "version-0-own")
    return tmp_path


OTHERS = {
    *("version-1.0-production", "version-40", "version-3-another", "version-9-own"),
    "version-link",
}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_pushes_by_files_remove_the_runs_own_folders_alone(folder: Path) -> None:
    disk: Any = DiskWeights.__new__(DiskWeights)
    disk.folder, disk._manifests, disk.run = folder, {}, "own"
    for version in range(4):
        draft = folder / pushed_folders.folder_name(version, "own")
        draft.mkdir()
        pushed_folders.mark(draft, "own")
        disk._settle(draft, version, [{}])
    assert names(folder) == {*OTHERS, "version-2-own", "version-3-own"}


def test_pushes_by_checkpoints_remove_the_runs_own_folders_alone(folder: Path) -> None:
    sent: Any = CheckpointWeights.__new__(CheckpointWeights)
    sent.folder, sent.run = folder, "own"
    for version in range(4):
        target = folder / pushed_folders.folder_name(version, "own")
        target.mkdir()
        sent._remove_old(version, target)
    assert names(folder) == {*OTHERS, "version-2-own", "version-3-own"}


def test_the_same_push_of_two_runs_has_two_folders() -> None:
    assert pushed_folders.folder_name(3, "a") != pushed_folders.folder_name(3, "b")
