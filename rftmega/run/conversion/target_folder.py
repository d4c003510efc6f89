"""Manages the folder that a conversion writes: a new one, or one of an interrupted conversion."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rftmega.checkpoints.reader import PROGRESS
from rftmega.core.errors import CheckpointError
from rftmega.runtime.parallel.folder_lock import FILE as LOCK
from rftmega.runtime.parallel.folder_lock import locked

FILE_BYTES = 512 * 2**20  # maximum size of one file of weights
Progress = Callable[[int], object]  # called with the number of bytes finished


@contextmanager
def written_alone(target: Path) -> Iterator[None]:
    """Locks `target` against other conversions within a `with` block.

    Raises LockedError if another conversion holds the lock or the folder can't be used, and
    CheckpointError for an I/O error such as a full disk. After an error, incomplete files are
    removed and finished files are kept.
    """
    with locked(target, "conversion"):
        try:
            yield
        except CheckpointError:
            _remove_drafts(target)
            raise
        except OSError as error:
            _remove_drafts(target)
            where = f" ({error.filename})" if error.filename else ""
            raise CheckpointError(
                f"The conversion to {target} broke off: {error.strerror or error}{where}. It needs room and rights there; "
                "the same command goes on with the next file."
            ) from error


def _remove_drafts(target: Path) -> None:
    for draft in target.glob("*.part"):
        with contextlib.suppress(OSError):
            draft.unlink()


class Files(Protocol):
    """Files is the interface to a folder of weights."""

    @property
    def files(self) -> list[Path]: ...


def fingerprint(files: Files) -> str:
    """Returns a hash of the names, sizes and modification times of the source's files; a conversion
    is resumed only if they are unchanged.
    """
    said = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files.files]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def begin(target: Path, job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Opens `target`, a new folder or one of an interrupted conversion. Returns file name -> log
    entry of each finished file.

    `job`: the conversion's source (its fingerprint) and options, as JSON; it is the first line of
    the log PROGRESS, and each following line is the entry of a finished file. Raises
    CheckpointError if `target` is the conversion of another job, or holds other files.
    """
    log = target / PROGRESS
    if log.is_file():
        first, *rest = _noted(log) or [{}]
        if first != job:
            raise CheckpointError(
                f"{target} is a conversion of something else, broken off. Remove it, or choose another folder."
            )
        finished = {said["file"]: said for said in rest if "file" in said}
        return {name: said for name, said in finished.items() if (target / name).is_file()}
    if target.exists() and any(not path.name.startswith(LOCK) for path in target.iterdir()):
        raise CheckpointError(
            f"{target} exists and is not empty. Remove it, or choose another folder."
        )
    target.mkdir(parents=True, exist_ok=True)
    note(target, job)
    return {}


def _noted(log: Path) -> list[dict[str, Any]]:
    """Returns the entries of a conversion's progress log.

    Lines that are incomplete, or zeros after a power loss, are skipped: the files that they were
    about are converted again.
    """
    found: list[dict[str, Any]] = []
    for line in log.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                found.append(said)
    return found


def note(target: Path, said: dict[str, Any]) -> None:
    with (target / PROGRESS).open("ab", buffering=0) as stream:
        # one write, appended whole: two files may end at once
        stream.write((json.dumps(said) + "\n").encode())
