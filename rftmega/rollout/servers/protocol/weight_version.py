"""Version strings of pushed weights: the policy's version number with the id of the run, so that
the weights of two runs are never confused.
"""

import re

NAMED = re.compile(r"([0-9]{1,9})(?:@([0-9a-z]+))?")


def named(version: int, run: str) -> str:
    """Returns the version string under which a server reports the weights of the policy's version
    `version`. `run`: id of the run that pushed them; "": a run without an id.
    """
    return f"{version}@{run}" if run else str(version)


def number_of(told: str, run: str) -> int | None:
    """Returns the version number in the version string `told`; None if the string does not name
    weights that the run `run` pushed.
    """
    found = NAMED.fullmatch(told)
    return int(found[1]) if found and (found[2] or "") == run else None
