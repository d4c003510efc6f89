"""Names, marks and removes the folders that pushes write. A run removes only its own folders."""

import shutil
from collections.abc import Collection
from pathlib import Path

MARK = ".rftmega-push"  # file in a folder, with the name of its run


def folder_name(version: int, run: str) -> str:
    """Returns the folder name of a push, unique per weight version and run."""
    return f"version-{version}-{run}" if run else f"version-{version}"


def mark(folder: Path, run: str) -> None:
    """Writes a marker file into `folder` that records the folder as belonging to the run named
    `run`. Raises OSError if the file can't be written.
    """
    (folder / MARK).write_text(run)


def remove_old(folder: Path, run: str, kept: Collection[str]) -> None:
    """Removes the push folders in `folder` that belong to the run named `run`, except those whose
    names are in `kept`. Folders of other runs stay.
    """
    for old in folder.glob("version-*"):
        if old.name not in kept and _is_of(old, run):
            shutil.rmtree(old, ignore_errors=True)


def _is_of(folder: Path, run: str) -> bool:
    try:
        return not folder.is_symlink() and (folder / MARK).read_bytes() == run.encode()
    except OSError:
        return False
