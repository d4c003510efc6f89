"""Identifies the code that runs."""

import functools
import subprocess
from pathlib import Path

from rftmega.runtime.parallel.nodes import versions

ROOT = Path(__file__).parents[2]
SECONDS = 10.0  # git looks at every file


@functools.cache
def code_versions() -> dict[str, str]:
    """Returns the versions of the packages that take part, and this package's commit where it is a
    checkout that git can read.
    """
    return versions() | {"commit": commit(ROOT)}


def commit(folder: Path) -> str:
    """Returns the hash of a folder's commit, with "-dirty" behind it where tracked files have
    changed; "" if unknown.
    """
    if not (folder / ".git").exists():  # git would go on looking above
        return ""
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
