"""Export folders: completed under another name first; a later export replaces only exports."""

import logging
import shutil
from pathlib import Path

MARK = ".rftmega-export"
SAID = "An export of rftmega made this folder. The next one to the same place replaces it; without this file it would not.\n"
log = logging.getLogger(__name__)


def is_anothers(folder: Path) -> bool:
    """Returns whether the path holds something that no export made."""
    if folder.is_symlink() or not folder.is_dir():
        return folder.exists() or folder.is_symlink()
    return not (folder / MARK).is_file() and any(folder.iterdir())


def begin(folder: Path) -> Path:
    """Creates an empty draft folder to export to, which `settle` renames.

    Raises OSError.
    """
    draft = folder.with_name(folder.name + ".incomplete")
    if is_anothers(draft):
        raise FileExistsError(f"{draft} is there, and no export made it")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    (draft / MARK).write_text(SAID)
    return draft


def settle(draft: Path, folder: Path) -> Path:
    """Renames a complete draft, replacing an earlier export, and returns its path.

    If something else has the name, the draft gets a numbered name beside it. Raises OSError.
    """
    if is_anothers(folder):
        free = folder
        number = 2
        while free.exists() or free.is_symlink():
            free, number = folder.with_name(f"{folder.name}.{number}"), number + 1
        log.warning("%s is no export's, and stays; the model is in %s.", folder, free)
        return draft.rename(free)
    before = folder.with_name(folder.name + ".before")
    if folder.exists():
        if before.exists() and not is_anothers(before):
            shutil.rmtree(before)
        folder.rename(before)
    draft.rename(folder)
    if before.exists() and not is_anothers(before):
        shutil.rmtree(before)
    return folder
