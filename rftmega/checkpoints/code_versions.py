"""Identifies the versions of the running code."""

import functools
import subprocess
from pathlib import Path

from rftmega.runtime.parallel.nodes import versions

ROOT = Path(__file__).parents[2]
SECONDS = 10.0  # limit for git, which reads every file


@functools.cache
def code_versions() -> dict[str, str]:
    """Returns the versions of the packages involved, and this package's commit if it is a git
    checkout.
    """
    return versions() | {"commit": commit(ROOT)}


def commit(folder: Path) -> str:
    """Returns the commit hash of a folder, with the suffix "-dirty" if tracked files have changed;
    "" if unknown.
    """
    if not (folder / ".git").exists():  # git would search the parent folders
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
