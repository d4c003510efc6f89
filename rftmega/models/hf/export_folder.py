"""A folder that an export makes whole under another name first, and that a later export replaces,
where it is an export's.
"""

import logging
import shutil
from pathlib import Path

MARK = ".rftmega-export"
SAID = "An export of rftmega made this folder. The next one to the same place replaces it; without this file it would not.\n"
log = logging.getLogger(__name__)


def is_anothers(folder: Path) -> bool:
    """Returns whether something is there that no export made."""
    if folder.is_symlink() or not folder.is_dir():
        return folder.exists() or folder.is_symlink()
    return not (folder / MARK).is_file() and any(folder.iterdir())


def begin(folder: Path) -> Path:
    """Makes an empty folder to export to, which gets its name in `settle`.

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
    """Gives the draft its name, which it has now.

    Gives it one beside where that is taken by what no export made.

    Raises OSError.
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
