"""Gathers the rollouts of all processes on each process, stored once per host."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core import expert_routes
from rftmega.core.rollout_arrays import COLUMNS, ROUTES, RolloutArrays, RolloutPlace
from rftmega.core.types import Rollout
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.host_memory import HostMemory


def gathered(
    own: Mapping[int, Rollout], host: HostMemory, *said: Any
) -> tuple[dict[int, int], RolloutArrays, list[tuple[Any, ...]]]:
    """Gathers the rollouts of all processes on every process, and other picklable values (`said`)
    of each process; a collective. `own`: this process's rollouts, by the index of the task; `host`:
    stores the arrays once per host.

    Returns (task index -> index in the gathered rollouts, the gathered rollouts, the tuple `said`
    of each rank).
    """
    arrays = RolloutArrays.of([*own.values()])
    columns = [arrays.columns[name] for name in COLUMNS]
    routes = arrays.columns.get(ROUTES)
    shape = None if routes is None else (routes.dtype, tuple(routes.shape[1:]))
    told = gather_objects((list(own), arrays.places, len(columns[0]), shape, said))
    sizes = [size for _, _, size, _, _ in told]
    found = dict(zip(COLUMNS, host.gathered(columns, sizes), strict=True))
    shapes = [theirs for _, _, _, theirs, _ in told if theirs is not None]
    if shapes:
        kind, of_token = shapes[0]
        found[ROUTES] = _gathered_routes(routes, sizes, kind, of_token, host)
    tasks: list[int] = []
    places: list[RolloutPlace | None] = []
    start = 0
    for numbers, theirs, size, _, _ in told:
        tasks += numbers
        places += [None if place is None else place.moved(start) for place in theirs]
        start += size
    where = {task: number for number, task in enumerate(tasks)}
    return where, RolloutArrays(found, places), [said for *_, said in told]


def _gathered_routes(
    own: Tensor | None,
    sizes: Sequence[int],
    kind: torch.dtype,
    shape: Sequence[int],
    host: HostMemory,
) -> Tensor:
    """Gathers the expert routes of all processes' tokens into one tensor [sum of sizes, *shape] of
    dtype `kind`. `own`: this process's routes; None if it has none, then its tokens get entries
    that are marked unknown. `sizes`: number of tokens of each process; `shape`: layers and experts
    per token; `host`: stores the tensor once per host.
    """
    mine = sizes[dist.get_rank() if len(sizes) > 1 else 0]
    if own is None:
        own = torch.full((mine, *shape), expert_routes.unknown(kind), dtype=kind)
    each = math.prod(shape)
    (found,) = host.gathered([own.flatten()], [size * each for size in sizes])
    return found.view(-1, *shape)


def in_order(where: Mapping[int, int], rollouts: RolloutArrays, tasks: int) -> RolloutArrays:
    """Returns the rollouts in the order of the tasks, None for a task without a rollout. `where`:
    task index -> index in `rollouts`; `tasks`: number of tasks.
    """
    numbers = [where.get(task) for task in range(tasks)]
    return RolloutArrays(
        rollouts.columns, [None if n is None else rollouts.places[n] for n in numbers]
    )


def shared(rollouts: Sequence[Rollout | None], host: HostMemory) -> RolloutArrays:
    """Moves the arrays of `rollouts`, of which every process has an equal copy, to shared memory,
    so that each host keeps one copy, and returns the rollouts with these arrays; None (a lost
    rollout) stays None. A collective. `host`: the shared memory.
    """
    return host.once(lambda: RolloutArrays.of(rollouts))
