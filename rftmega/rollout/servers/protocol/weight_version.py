"""Version strings of pushes: the version number with the id of the run, so that the weights of two
runs are never confused.
"""

import re

NAMED = re.compile(r"([0-9]{1,9})(?:@([0-9a-z]+))?")


def named(version: int, run: str) -> str:
    """Returns the version string that a server reports for push number `version`. `run`: id of the
    run, "" for a run without one.
    """
    return f"{version}@{run}" if run else str(version)


def number_of(told: str, run: str) -> int | None:
    """Returns the push number in the version string `told`, or None if the string does not name a
    push of `run`.
    """
    found = NAMED.fullmatch(told)
    return int(found[1]) if found and (found[2] or "") == run else None
