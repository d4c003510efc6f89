"""Comparing two pieces of work on a machine whose speed wanders: by turns, and the median of the
ratios.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from rftmega.runtime import device


class Comparison(NamedTuple):
    """Seconds of each, and theirs over ours: how many times faster the first is."""

    ours: float
    theirs: float
    ratio: float


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds until the device has done the work, too."""
    device.current().synchronize()
    begin = time.perf_counter()
    work()
    device.current().synchronize()
    return time.perf_counter() - begin


def median_seconds(work: Callable[[], object], *, rounds: int) -> float:
    """Returns the median of so many runs, after one to warm up."""
    work()
    return statistics.median(seconds(work) for _ in range(rounds))


def compare(ours: Callable[[], object], theirs: Callable[[], object], *, rounds: int) -> Comparison:
    """Each once to warm up, then `rounds` times by turns."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Comparison(first, second, statistics.median(b / a for a, b in pairs))
