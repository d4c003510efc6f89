"""Names, marks and removes the folders that pushes write, of which a run knows its own."""

import shutil
from collections.abc import Collection
from pathlib import Path

MARK = ".rftmega-push"  # file in a folder, with the name of its run


def folder_name(version: int, run: str) -> str:
    """Returns another name for each push of each run."""
    return f"version-{version}-{run}" if run else f"version-{version}"


def mark(folder: Path, run: str) -> None:
    """Marks a folder as the run's. Raises OSError where it can't."""
    (folder / MARK).write_text(run)


def remove_old(folder: Path, run: str, kept: Collection[str]) -> None:
    """Removes the run's folders but for those that are kept. What another made stays."""
    for old in folder.glob("version-*"):
        if old.name not in kept and _is_of(old, run):
            shutil.rmtree(old, ignore_errors=True)


def _is_of(folder: Path, run: str) -> bool:
    try:
        return not folder.is_symlink() and (folder / MARK).read_bytes() == run.encode()
    except OSError:
        return False
