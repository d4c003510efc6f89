"""Compares two functions on a machine with varying speed: alternating runs, and the median of the
ratios.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from rftmega.runtime import device


class Comparison(NamedTuple):
    """Comparison holds the seconds of each, and theirs over ours: how many times faster ours is."""

    ours: float
    theirs: float
    ratio: float


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds until the function and the device have finished."""
    device.current().synchronize()
    begin = time.perf_counter()
    work()
    device.current().synchronize()
    return time.perf_counter() - begin


def median_seconds(work: Callable[[], object], *, rounds: int) -> float:
    """Returns the median of so many runs, after a warm-up."""
    work()
    return statistics.median(seconds(work) for _ in range(rounds))


def compare(ours: Callable[[], object], theirs: Callable[[], object], *, rounds: int) -> Comparison:
    """Runs each once to warm up, then `rounds` times alternately."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Comparison(first, second, statistics.median(b / a for a, b in pairs))
