"""Names a push to servers: its number, and the run that it is of, so that the weights of two runs are
never taken for each other's.
"""

import re

NAMED = re.compile(r"([0-9]{1,9})(?:@([0-9a-z]+))?")


def named(version: int, run: str) -> str:
    """Returns what a server is told that it answers under. `run` "": of no run by name."""
    return f"{version}@{run}" if run else str(version)


def number_of(told: str, run: str) -> int | None:
    """Returns the number of a push; None where `told` names none of this run's."""
    found = NAMED.fullmatch(told)
    return int(found[1]) if found and (found[2] or "") == run else None
