"""Version strings of pushes: the push number with the run's id, so that the weights of two runs are
never confused.
"""

import re

NAMED = re.compile(r"([0-9]{1,9})(?:@([0-9a-z]+))?")


def named(version: int, run: str) -> str:
    """Returns the version string that a server reports. `run`: "" for an unnamed run."""
    return f"{version}@{run}" if run else str(version)


def number_of(told: str, run: str) -> int | None:
    """Returns the number of the push, or None if `told` is no push of this run."""
    found = NAMED.fullmatch(told)
    return int(found[1]) if found and (found[2] or "") == run else None
