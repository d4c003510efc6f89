"""The folder that a conversion writes: new, or broken off and gone on with."""

import hashlib
import json
from pathlib import Path
from typing import Any

from converters.hf_folder import HFFolder
from rftmega.errors import CheckpointError
from rftmega.megatron.stored import PROGRESS


def fingerprint(files: HFFolder) -> str:
    """Of the source: a conversion goes on only where it is the same."""
    said = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files.files]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def begin(target: Path, job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Opens `target`, new or broken off; file -> what was noted of it, for files that are finished.

    PROGRESS says what is converted in its first line, then has one line a finished file.

    Raises CheckpointError where `target` is something else.
    """
    log = target / PROGRESS
    if log.is_file():
        first, *rest = [line for line in log.read_text().split("\n")[:-1] if line]  # a last line without its end is half a line
        if json.loads(first) != job:
            raise CheckpointError(f"{target} is a conversion of something else, broken off. Remove it, or choose another folder.")
        finished = {(said := json.loads(line))["file"]: said for line in rest}
        return {name: said for name, said in finished.items() if (target / name).is_file()}
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is not empty. Remove it, or choose another folder.")
    target.mkdir(parents=True, exist_ok=True)
    note(target, job)
    return {}


def note(target: Path, said: dict[str, Any]) -> None:
    with (target / PROGRESS).open("ab", buffering=0) as stream:
        stream.write((json.dumps(said) + "\n").encode())  # one write, appended whole: two files may end at once
