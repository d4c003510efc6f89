"""What torch's CPU allocator gave and took, as its profiler tells it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def most_bytes(work: Callable[[], Any], *, without: tuple[str, ...] = ()) -> int:
    """The most that tensors made in `work` hold at once; `without` those made in operators of these
    names.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    kineto = profile.profiler
    assert kineto is not None
    changes: list[tuple[int, int, int, bool]] = []
    for event in kineto.kineto_results.experimental_event_tree():
        changes += _changes(event, without, counted=True)
    held = most = 0
    living: dict[int, int] = {}
    for _, address, size, counted in sorted(changes):
        if size > 0 and counted:
            living[address] = size
            held += size
        elif size < 0:
            held -= living.pop(address, 0)
        most = max(most, held)
    return most


def _changes(
    event: Any, without: tuple[str, ...], *, counted: bool
) -> Iterator[tuple[int, int, int, bool]]:
    counted = counted and not any(name in event.name for name in without)
    if event.tag.name == "Allocation":
        change = event.extra_fields
        yield event.start_time_ns, change.ptr, change.alloc_size, counted
    for child in event.children:
        yield from _changes(child, without, counted=counted)
