"""Which code runs."""

import functools
import subprocess
from pathlib import Path

from rftmega.parallel.nodes import versions

ROOT = Path(__file__).parents[2]
SECONDS = 10.0  # git looks at every file


@functools.cache
def code_versions() -> dict[str, str]:
    """Of what takes part, and this package's commit where it is a checkout that git can read."""
    return versions() | {"commit": commit(ROOT)}


def commit(folder: Path) -> str:
    """Its hash, with "-dirty" behind it where tracked files were changed since; "" where nobody knows."""
    if not (folder / ".git").exists():  # git would go on looking above
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
