"""Rollouts of all processes, one copy of them a host."""

from collections.abc import Mapping, Sequence
from typing import Any

from rftmega.parallel.collectives import gather_objects
from rftmega.parallel.host_memory import HostMemory
from rftmega.rollout_arrays import COLUMNS, RolloutArrays, RolloutPlace
from rftmega.types import Rollout


def gathered(
    own: Mapping[int, Rollout], host: HostMemory, *said: Any
) -> tuple[dict[int, int], RolloutArrays, list[tuple[Any, ...]]]:
    """Gathers the rollouts that each process has of some tasks, and what each has `said`.

    Returns task -> place in the rollouts, these, and what was said, in the order of ranks. A
    collective.
    """
    arrays = RolloutArrays.of([*own.values()])
    columns = [arrays.columns[name] for name in COLUMNS]
    told = gather_objects((list(own), arrays.places, len(columns[0]), said))
    sizes = [size for _, _, size, _ in told]
    found = dict(zip(COLUMNS, host.gathered(columns, sizes), strict=True))
    tasks: list[int] = []
    places: list[RolloutPlace | None] = []
    start = 0
    for numbers, theirs, size, _ in told:
        tasks += numbers
        places += [None if place is None else place.moved(start) for place in theirs]
        start += size
    where = {task: number for number, task in enumerate(tasks)}
    return where, RolloutArrays(found, places), [said for *_, said in told]


def in_order(where: Mapping[int, int], rollouts: RolloutArrays, tasks: int) -> RolloutArrays:
    """Returns a rollout for each of so many tasks, None where there is none."""
    numbers = [where.get(task) for task in range(tasks)]
    return RolloutArrays(
        rollouts.columns, [None if n is None else rollouts.places[n] for n in numbers]
    )


def shared(rollouts: Sequence[Rollout | None], host: HostMemory) -> RolloutArrays:
    """Returns the rollouts, which every process has, as one copy a host."""
    return host.once(lambda: RolloutArrays.of(rollouts))
