"""Finds the versions of the running code: installed packages and git commit."""

import functools
import subprocess
from pathlib import Path

from rftmega.runtime.parallel.nodes import versions

ROOT = Path(__file__).parents[2]
SECONDS = 10.0  # limit for git, which reads every file


@functools.cache
def code_versions() -> dict[str, str]:
    """Returns the versions of the packages that a run depends on, by name, and under "commit" the
    git commit of this project ("" if it is not a git checkout).
    """
    return versions() | {"commit": commit(ROOT)}


def commit(folder: Path) -> str:
    """Returns the commit hash of the git checkout `folder`, with the suffix "-dirty" if tracked
    files have changed; "" if the folder is no checkout or git fails.
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
