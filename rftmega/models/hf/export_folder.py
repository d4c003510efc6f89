"""Creates export folders: an export is completed in a draft folder first, and replaces a folder
only if that is an earlier export.
"""

import logging
import shutil
from pathlib import Path

MARK = ".rftmega-export"
SAID = "An export of rftmega made this folder. The next one to the same place replaces it; without this file it would not.\n"
log = logging.getLogger(__name__)


def is_anothers(folder: Path) -> bool:
    """Returns whether something exists at the path `folder` that no export created; an empty folder
    counts as free.
    """
    if folder.is_symlink() or not folder.is_dir():
        return folder.exists() or folder.is_symlink()
    return not (folder / MARK).is_file() and any(folder.iterdir())


def begin(folder: Path) -> Path:
    """Creates an empty draft folder for an export to `folder`; `settle` renames it.

    Raises OSError, also if the draft's name is taken by something that no export created.
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
    """Renames a complete draft to `folder`, replacing an earlier export, and returns the final
    path.
    If no export created `folder`, the draft gets a numbered name next to it. Raises OSError.
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
