"""Files in a run's output folder: those of an earlier run are set aside, and what was written
reaches the disk.
"""

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def set_aside(path: Path) -> None:
    """Gives what an earlier run left there another name, metrics.1.jsonl for metrics.jsonl, and
    says so.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    number, free = 1, path.with_name(f"{path.stem}.1{path.suffix}")
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
    path.rename(free)
    log.info("%s is an earlier run's: it is %s now.", path, free.name)


def synchronise(folder: Path) -> None:
    """Writes the names of the files in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
