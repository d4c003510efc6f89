"""What torch's CPU allocator gave and took, as its profiler tells it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch


class Change(NamedTuple):
    """`size`: negative where memory was freed."""

    time: int
    address: int
    size: int
    counted: bool


def most_bytes(work: Callable[[], Any], *, without: tuple[str, ...] = (), times: int = 1) -> int:
    """Returns the most bytes that tensors made in `work` hold at once; `without` those made in
    operators of these names.

    `times`: the least of so many measurements. A thread of gloo may drop its reference to a buffer
    late, and seem to hold more, never less.
    """
    return min(_measured(work, without) for _ in range(times))


def _measured(work: Callable[[], Any], without: tuple[str, ...]) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    kineto = profile.profiler
    assert kineto is not None
    changes: list[Change] = []
    for event in kineto.kineto_results.experimental_event_tree():
        changes += _changes(event, without, counted=True)
    return most_held(changes)


def most_held(changes: Iterable[Change]) -> int:
    """Returns the most bytes of counted memory held at once.

    A thread without the profiler does not tell what it frees, and one with it tells so only
    afterwards: memory is free once it is given again, and of two frees in a row the first is late.
    """
    events = sorted(changes)
    of_address: dict[int, list[Change]] = defaultdict(list)
    for event in events:
        of_address[event.address].append(event)
    late = {
        first
        for told in of_address.values()
        for first, second in pairwise(told)
        if first.size < 0 and second.size < 0
    }
    living: dict[int, Change] = {}
    most = 0
    for event in events:
        if event.size > 0:
            end = event.address + event.size
            for held in list(living.values()):
                if held.address < end and event.address < held.address + held.size:
                    del living[held.address]
            living[event.address] = event
            most = max(most, sum(held.size for held in living.values() if held.counted))
        elif event not in late:
            living.pop(event.address, None)
    return most


def _changes(event: Any, without: tuple[str, ...], *, counted: bool) -> Iterator[Change]:
    counted = counted and not any(name in event.name for name in without)
    if event.tag.name == "Allocation":
        change = event.extra_fields
        yield Change(event.start_time_ns, change.ptr, change.alloc_size, counted)
    for child in event.children:
        yield from _changes(child, without, counted=counted)
