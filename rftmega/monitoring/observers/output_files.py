"""Functions for files in a run's output folder: renaming files of an earlier run, and durable
writes.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rftmega.core.errors import OutputError

log = logging.getLogger(__name__)


def set_aside(path: Path) -> None:
    """Renames the output file or folder `path` of an earlier run, for example metrics.jsonl to
    metrics.1.jsonl, and logs the new name. Does nothing if `path` does not exist or is an empty
    folder.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    number, free = 1, path.with_name(f"{path.stem}.1{path.suffix}")
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
    path.rename(free)
    log.info("%s is an earlier run's: it is %s now.", path, free.name)


@contextmanager
def writing(path: Path, *, warn: bool = False) -> Iterator[None]:
    """Context manager for a block that writes to `path`: adds the path and advice to the message of
    an OSError, such as a full disk.

    Raises OutputError for an OSError in the block; with `warn`, logs a warning instead, and the
    output is lost.
    """
    try:
        yield
    except OSError as error:
        told = f"{path} can't be written: {error.strerror or error}."
        if not warn:
            raise OutputError(
                f"{told} Make room or rights there, or choose another trainer.output; checkpoint.on_failure=warn would train on."
            ) from error
        log.warning("%s The run goes on without what was to go there.", told)


def synchronise(folder: Path) -> None:
    """Writes the directory entries of a folder to the disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
