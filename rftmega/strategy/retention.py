"""Which checkpoints of a folder stay, and which is the latest."""

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rftmega.checkpoint.training import note_of
from rftmega.errors import CheckpointError
from rftmega.megatron.stored import MANIFEST

log = logging.getLogger(__name__)
LATEST = "latest"  # a file that holds the name of the newest complete checkpoint
DRAFT = ".incomplete"


class Saved(NamedTuple):
    """One complete checkpoint."""

    name: str
    age: float  # seconds, or anything that is greater for an older one
    size: int  # bytes


def expired(saved: Sequence[Saved], *, max_num: int, max_mem: float) -> list[str]:
    """Names to delete, oldest first, until at most `max_num` are left with at most `max_mem` MB (10^6 bytes) together.

    The newest always stays, however large.
    """
    kept = sorted(saved, key=lambda each: -each.age)
    gone = []
    while len(kept) > 1 and (len(kept) > max_num or sum(each.size for each in kept) > max_mem * 1e6):
        gone.append(kept.pop(0).name)
    return gone


def rotate(folder: Path, *, max_num: int, max_mem: float) -> list[str]:
    """Deletes what has `expired` among the checkpoints of `folder`, and drafts older than the newest of them, whose saves have
    died; their names. Call it once the new one is there, which is none the worse for what can't be deleted: a warning says so.

    The latest, where that is an older one, stays too, and so does whatever else lies there: `folder` may be somebody's home.
    """
    complete = [path for path in folder.iterdir() if is_checkpoint(path)]
    saved = [
        Saved(path.name, -path.stat().st_mtime_ns, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        for path in complete
    ]
    pointer = folder / LATEST
    latest = pointer.read_text().strip() if pointer.is_file() else None
    gone = [name for name in expired(saved, max_num=max_num, max_mem=max_mem) if name != latest]
    newest = max((-each.age for each in saved), default=0)
    gone += [path.name for path in folder.glob(f"*{DRAFT}") if path.is_dir() and path.stat().st_mtime_ns < newest]
    for name in tuple(gone):
        try:
            shutil.rmtree(folder / name)
        except OSError as error:
            log.warning("%s can't be deleted, and stays: %s", folder / name, error)
            gone.remove(name)
    return gone


def is_checkpoint(path: Path) -> bool:
    """Whether this is the folder of a whole training checkpoint."""
    return not path.name.endswith(DRAFT) and all((path / name).is_file() for name in (MANIFEST, note_of(0)))


def point_to(folder: Path, name: str) -> None:
    """Makes `name` the latest; a reader sees the old pointer or the new one."""
    draft = folder / (LATEST + DRAFT)
    with draft.open("w") as stream:
        stream.write(name)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(folder / LATEST)


def settle(draft: Path, wanted: Path) -> Path:
    """Gives a whole draft its name; one beside it where that is taken, so that nothing goes before the pointer moves."""
    target, number = wanted, 2
    while target.exists():
        target, number = wanted.with_name(f"{wanted.name}.{number}"), number + 1
    return draft.rename(target)


def before(checkpoint: Path) -> Path | None:
    """The newest whole checkpoint beside this one that is older."""
    manifests = [path for path in checkpoint.parent.glob(f"*/{MANIFEST}") if not path.parent.name.endswith(DRAFT)]
    own = checkpoint / MANIFEST
    age = own.stat().st_mtime_ns if own.is_file() else float("inf")
    older = [path for path in manifests if path != own and path.stat().st_mtime_ns < age]
    return max(older, key=lambda path: path.stat().st_mtime_ns).parent if older else None


def find(folder: Path, tag: str | None) -> Path:
    """The checkpoint `tag`, or the latest. Raises CheckpointError where there is none."""
    if tag is None:
        if not (folder / LATEST).is_file():
            raise CheckpointError(f"{folder} has no file named {LATEST}, so there is no latest checkpoint. Give a tag.")
        tag = (folder / LATEST).read_text().strip()
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{folder} holds no checkpoint {tag!r}.")
    return folder / tag
