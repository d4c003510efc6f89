"""Checksums of the files of a Hugging Face folder: from rftmega's checksums.json in that folder, or
from the hub's download records.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.models.hf.hf_folder import CHECKSUMS, OF_WEIGHTS, draft_of, land

FORMAT = 1
AT_ONCE = 16 * 2**20  # bytes read at once
# pattern of each kind of digest; checksums are written as "sha256:..."
KINDS = {"xxh3": r"[0-9a-f]{32}", "sha256": r"[0-9a-f]{64}", "git": r"[0-9a-f]{40}"}


def known_sums(folder: Path) -> dict[str, str]:
    """Returns file name -> checksum from checksums.json or, if that is missing, from the records of
    the hub's download; empty if there is no record of some weight file.
    Raises CheckpointError if checksums.json can't be read.
    """
    if (folder / CHECKSUMS).exists():
        return _read_sums(folder / CHECKSUMS)
    found = {path.name: said for path in files_of(folder) if (said := _hubs(path))}
    weights = {path.name for path in folder.glob("*.safetensors")}
    return found if weights and weights <= found.keys() else {}


def files_of(folder: Path) -> list[Path]:
    """Lists the files of a folder that have checksums: all but hidden files and files that describe
    the weights, such as checksums.json.
    """
    odd = (*OF_WEIGHTS, draft_of(folder / CHECKSUMS).name)
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.name[0] != "." and path.name not in odd
    )


def sum_of(path: Path, kind: str, *, step: Callable[[], object] = lambda: None) -> str:
    """Returns the checksum of a file as "kind:digest"; `kind` is a key of KINDS.

    `step` is called after every AT_ONCE bytes. Raises CheckpointError if the file can't be read.
    """
    try:
        made: Any = (
            xxhash.xxh3_128()
            if kind == "xxh3"
            else hashlib.sha256()
            if kind == "sha256"
            else _git(path)
        )
        with path.open("rb", buffering=0) as file:
            while block := file.read(AT_ONCE):
                made.update(block)
                step()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}.") from error
    return f"{kind}:{made.hexdigest()}"


def write_sums(folder: Path, sums: Mapping[str, str] | None = None) -> None:
    """Writes checksums.json with the given `sums` (file name -> checksum), by default computed for
    all files.
    Raises CheckpointError if the file can't be written.
    """
    if sums is None:
        sums = {path.name: sum_of(path, "xxh3") for path in files_of(folder)}
    said = {"format": FORMAT, "files": dict(sorted(sums.items()))}
    try:
        draft_of(folder / CHECKSUMS).write_text(
            json.dumps(said | {"seal": _seal(said)}, indent=1) + "\n"
        )
        land(folder / CHECKSUMS)
    except OSError as error:
        raise CheckpointError(
            f"{folder / CHECKSUMS} can't be written: {error.strerror or error}."
        ) from error


def _read_sums(path: Path) -> dict[str, str]:
    said = read_json_object(path)
    sums = said.get("files")
    plain = isinstance(sums, dict) and all(
        isinstance(value, str) and name == Path(name).name for name, value in sums.items()
    )
    if (
        said.pop("seal", None) != _seal(said)
        or said.get("format") != FORMAT
        or not plain
        or not sums
    ):
        raise CheckpointError(
            f"{path} is not as it was written. Remove it, and it is written anew."
        )
    return dict(sums)


def _seal(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _hubs(path: Path) -> str | None:
    """Returns the hub's checksum of a file, or None if it is unknown.

    Files in the hub's cache are named by their checksum; a download to a local folder records it.
    """
    if path.is_symlink() and (target := path.resolve()).parent.name == "blobs":
        return _kinded(target.name)
    note = path.parent / ".cache/huggingface/download" / f"{path.name}.metadata"
    try:
        lines = note.read_text().splitlines()  # commit, checksum, time
    except (OSError, UnicodeDecodeError):
        return None
    return _kinded(lines[1].strip()) if len(lines) > 1 else None


def _kinded(digest: str) -> str | None:
    return next(
        (f"{kind}:{digest}" for kind in ("sha256", "git") if re.fullmatch(KINDS[kind], digest)),
        None,
    )


def _git(path: Path) -> Any:
    """Returns a git blob hash (SHA-1), begun with the blob header; the hub identifies small files
    by it.
    """
    return hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
