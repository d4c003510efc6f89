"""Measures by how much the clocks of a run's processes differ."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from rftmega.runtime import device
from rftmega.runtime.parallel.collectives import gather_objects

ROUNDS = 16


class Offset(NamedTuple):
    """Offset is how far a process's clock is ahead of the clock of rank 0, and the bound of the
    measurement's error, both in nanoseconds.
    """

    ahead: int
    error: int


def clock_offsets(clock: Callable[[], int] = time.perf_counter_ns) -> list[Offset]:
    """Measures how far each process's clock is ahead of rank 0's, and returns the offsets in the
    order of ranks; a collective.

    `clock` returns the time of this process in nanoseconds. No process leaves a barrier before all
    have entered it (F. Cristian's bound on the offset, 1989, with a barrier for his request and
    reply): with the times at which two processes entered and left, each barrier bounds their offset
    from both sides, whatever the barrier's delay. The result combines the tightest bounds of ROUNDS
    barriers.
    """
    seen = [_barrier(clock) for _ in range(ROUNDS)]
    first, *_ = everyone = gather_objects(seen)
    return [_offset(seen, first) for seen in everyone]


def _barrier(clock: Callable[[], int]) -> tuple[int, int]:
    """Runs a barrier and returns the times (by `clock`) at which this process entered and left it."""
    came = clock()
    everybody = torch.ones((), device=device.current().here())
    if dist.is_initialized():
        dist.all_reduce(everybody)
    everybody.item()  # the host waits, too
    return came, clock()


def _offset(mine: list[tuple[int, int]], first: list[tuple[int, int]]) -> Offset:
    low = max(came - left for (came, _), (_, left) in zip(mine, first, strict=True))
    high = min(left - came for (_, left), (came, _) in zip(mine, first, strict=True))
    return Offset((low + high) // 2, (high - low + 1) // 2)
