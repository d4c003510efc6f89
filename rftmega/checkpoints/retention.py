"""Finds the latest checkpoint of a folder and deletes old ones."""

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rftmega.checkpoints.reader import MANIFEST
from rftmega.checkpoints.training_files import note_of
from rftmega.core.errors import CheckpointError

log = logging.getLogger(__name__)
LATEST = "latest"  # file with the name of the latest complete checkpoint
DRAFT = ".incomplete"
NAMED = re.compile(r"step_(\d+)\b")  # as `TrainingCheckpoints.save` names them
MARK = ".rftmega-checkpoint"  # marker file in each: other folders are never deleted


class Saved(NamedTuple):
    """Saved is the name, age and size of one complete checkpoint."""

    name: str
    age: float  # any number that is greater for an older checkpoint
    size: int  # bytes


def expired(saved: Sequence[Saved], *, max_num: int, max_mem: float) -> list[str]:
    """Returns the names of the checkpoints in `saved` to delete, oldest first, so that at most
    `max_num` are left and take at most `max_mem` MB (10^6 bytes) together.

    The newest checkpoint is never deleted, whatever its size.
    """
    kept = sorted(saved, key=lambda each: -each.age)
    gone = []
    while len(kept) > 1 and (
        len(kept) > max_num or sum(each.size for each in kept) > max_mem * 1e6
    ):
        gone.append(kept.pop(0).name)
    return gone


def rotate(folder: Path, *, max_num: int, max_mem: float, saved: str = "") -> list[str]:
    """Deletes expired checkpoints of `folder` (for `max_num` and `max_mem` see `expired`), and
    drafts (unfinished checkpoints of crashed saves) that are older than the newest checkpoint.
    Returns the deleted names. Call it after a new checkpoint is complete; a failed deletion only
    logs a warning.

    Age is determined by steps, not by file times. `saved`: name of the checkpoint written last;
    checkpoints of later steps belong to an abandoned run that was resumed from an earlier step, and
    are deleted first.

    The checkpoint that is marked as latest is never deleted, even if it is the oldest. Files and
    folders that are no checkpoints are not touched: `folder` may be a home directory.
    """
    complete = [path for path in folder.iterdir() if is_checkpoint(path)]
    last = written_at(folder / saved) if saved else max(map(written_at, complete), default=NEVER)
    complete.sort(key=lambda path: (written_at(path) <= last, written_at(path)))
    known = [
        Saved(
            path.name,
            -place,
            sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        )
        for place, path in enumerate(complete)
    ]
    latest = pointed(folder)
    gone = [name for name in expired(known, max_num=max_num, max_mem=max_mem) if name != latest]
    gone += [
        path.name
        for path in folder.glob(f"*{DRAFT}")
        if is_draft(path) and begun_at(path, last) < last
    ]
    for name in tuple(gone):
        try:
            shutil.rmtree(folder / name)
        except OSError as error:
            log.warning("%s can't be deleted, and stays: %s", folder / name, error)
            gone.remove(name)
    return gone


class Written(NamedTuple):
    """Written is the position of a checkpoint in the order in which a run saved its checkpoints."""

    step: int
    again: int  # number of the checkpoint among those of its name
    time: int  # nanoseconds: the tie-breaker


NEVER = Written(-1, -1, -1)


def written_at(checkpoint: Path) -> Written:
    """Returns the position of a checkpoint among the others, by the step in its manifest or else in
    its name; NEVER if it has no manifest.
    """
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return NEVER
    suffix = checkpoint.name.rpartition(".")[2]
    step = _step_in(manifest, manifest.stat().st_mtime_ns)
    named = re.match(NAMED, checkpoint.name)
    if step is None:
        step = int(named[1]) if named else -1
    again = int(suffix) if suffix.isdecimal() else 1
    return Written(step, again, checkpoint.stat().st_mtime_ns)


def begun_at(draft: Path, last: Written) -> Written:
    """Returns the position of a draft among checkpoints, by the step in its name; see `written_at`.
    `last`: the position of the newest checkpoint, whose step counts if the name has none.
    """
    named = re.match(NAMED, draft.name)
    step = int(named[1]) if named else last.step
    return Written(step, last.again, draft.stat().st_mtime_ns)


@cache
def _step_in(manifest: Path, changed: int) -> int | None:
    """Returns the step in a manifest, or None if it has none. The result is cached, since the file
    may be long; `changed`, the file's modification time, makes the cache reread a replaced file.
    """
    try:
        said = json.loads(manifest.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    step = said.get("step") if isinstance(said, dict) else None
    return step if isinstance(step, int) else None


def begin(folder: Path, name: str) -> Path:
    """Creates an empty folder for a draft (unfinished checkpoint) of the checkpoint `name`, and
    returns its path. A draft that a crashed save left behind is removed.

    Raises OSError, e.g. FileExistsError if a folder of this name exists that no save created.
    """
    draft = folder / (name + DRAFT)
    if draft.exists() and not is_draft(draft):
        raise FileExistsError(f"{draft} is there, and no save made it")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    (draft / MARK).touch()
    return draft


def is_draft(path: Path) -> bool:
    """Returns whether `path` is a draft (unfinished checkpoint): a folder with the marker file of a
    save, or an empty folder.
    """
    return path.is_dir() and ((path / MARK).is_file() or not any(path.iterdir()))


def is_checkpoint(path: Path) -> bool:
    """Returns whether `path` is the folder of a complete training checkpoint."""
    return not path.name.endswith(DRAFT) and all(
        (path / name).is_file() for name in (MANIFEST, note_of(0))
    )


def point_to(folder: Path, name: str) -> None:
    """Makes `name` the latest checkpoint in `folder`: atomically replaces the pointer file, which
    contains the name of the latest checkpoint.
    """
    draft = folder / (LATEST + DRAFT)
    with draft.open("w") as stream:
        stream.write(name)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(folder / LATEST)


def settle(draft: Path, wanted: Path) -> Path:
    """Renames `draft`, the folder of a complete checkpoint, to `wanted`, or to a numbered variant
    if `wanted` exists, so that no checkpoint is removed before the pointer file is updated. Returns
    the new path.
    """
    target, number = wanted, 2
    while target.exists():
        target, number = wanted.with_name(f"{wanted.name}.{number}"), number + 1
    return draft.rename(target)


def before(checkpoint: Path) -> Path | None:
    """Returns the newest complete checkpoint in the same folder that is older than `checkpoint`, or
    None if there is none.
    """
    manifests = [
        path
        for path in checkpoint.parent.glob(f"*/{MANIFEST}")
        if not path.parent.name.endswith(DRAFT)
    ]
    others = [path.parent for path in manifests if path.parent != checkpoint]
    if (checkpoint / MANIFEST).is_file():
        own = written_at(checkpoint)
        others = [path for path in others if written_at(path) < own]
    return max(others, key=written_at, default=None)


def pointed(folder: Path) -> str | None:
    """Returns the content of the pointer file, the name of the latest checkpoint (may be "" after a
    power loss); None if there is no pointer file.
    """
    pointer = folder / LATEST
    return pointer.read_text(errors="replace").strip("\0 \n") if pointer.is_file() else None


def newest(folder: Path) -> Path | None:
    """Returns the complete checkpoint in `folder` with the highest step, or
    None if there is none.
    """
    whole = [path for path in folder.iterdir() if is_checkpoint(path)] if folder.is_dir() else []
    return max(whole, key=written_at, default=None)


def find(folder: Path, tag: str | None) -> Path:
    """Returns the folder of checkpoint `tag`, or with `tag` None of the latest checkpoint, which
    the pointer file names. If the pointer file names no complete checkpoint, logs a warning and
    returns the newest complete one. Raises CheckpointError if there is no checkpoint to return or
    no pointer file.
    """
    whole = newest(folder)
    there = f" The newest whole one is {whole}." if whole else " There is no whole one."
    if tag is not None:
        if not (folder / tag).is_dir():
            raise CheckpointError(f"{folder} holds no checkpoint {tag!r}.{there}")
        return folder / tag
    named = pointed(folder)
    if named is None:
        raise CheckpointError(
            f"{folder} has no file named {LATEST}, so there is no latest checkpoint. Give a tag.{there}"
        )
    if named and is_checkpoint(folder / named):
        return folder / named
    wrong = (
        f"{folder / LATEST} names {named!r}, which is no whole checkpoint."
        if named
        else f"{folder / LATEST} is empty."
    )
    if whole is None:
        raise CheckpointError(f"{wrong}{there} checkpoint.resume=none starts anew.")
    log.warning("%s The run goes on from the newest whole one, %s.", wrong, whole)
    return whole
