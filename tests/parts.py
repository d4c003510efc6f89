"""Divide files of tests into parts that take about the same time, for `make ranks PART=2/3`."""

import re
from collections.abc import Mapping

NEW = 30.0  # seconds that a file counts for which was never timed


def chosen_part(given: str) -> tuple[int, int]:
    """The number of a part, from 1, and of how many. Raises ValueError for what is none."""
    found = re.fullmatch(r"(\d+)/(\d+)", given)
    number, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= of:
        raise ValueError(f"{given!r} is no part. Write 2/3 for the second of three.")
    return number, of


def parts_of(seconds: Mapping[str, float], count: int) -> list[set[str]]:
    """The files of each of `count` parts: the longest first, each into the part that is shortest so far."""
    parts: list[set[str]] = [set() for _ in range(count)]
    totals = [0.0] * count
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        shortest = totals.index(min(totals))
        parts[shortest].add(file)
        totals[shortest] += seconds[file]
    return parts
