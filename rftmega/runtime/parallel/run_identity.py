"""Identifies a run, so that engines can tell its weight pushes from another run's, and a resumed
run keeps its identity.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rftmega.core.errors import LockedError

FILE = ".rftmega-run"


def run_identity(output: Path) -> str:
    """Returns the random identifier of the run that writes to the folder `output`, the same on
    every process; creates the identifier if the folder has none.

    A copy of the folder gets a new identifier. Raises LockedError if the identifier can't be
    stored.
    """
    told: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            told[0] = _kept(output)
        except OSError as error:
            told[1] = f"{output / FILE} can't be written: {error.strerror or error}."
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    if told[1]:
        raise LockedError(told[1])
    return str(told[0])


def _kept(output: Path) -> str:
    output.mkdir(parents=True, exist_ok=True)
    file = output / FILE
    place = {"folder": str(output.resolve()), "inode": output.stat().st_ino}
    try:
        found = json.loads(file.read_bytes())
        if isinstance(found, dict) and found.get("place") == place and found.get("run"):
            return str(found["run"])
    except (FileNotFoundError, ValueError):
        pass
    name = secrets.token_hex(4)
    draft = file.with_name(f"{FILE}.incomplete")
    draft.write_text(json.dumps({"run": name, "place": place}))
    os.replace(draft, file)
    return name
