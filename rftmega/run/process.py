"""Runs one process of a run: among the others, on a host that was looked at, watched, and able to
hear that it is to stop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rftmega.config import RunConfig
from rftmega.model_providers.installed import installed
from rftmega.run import disk_space, integrity, start_notes
from rftmega.run.balancing import tell_balancing
from rftmega.runtime.parallel import nodes, preemption, process_group
from rftmega.runtime.parallel.lease import named
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.watchdog import watched


@contextmanager
def joined(config: RunConfig) -> Iterator[tuple[World, Callable[[], bool]]]:
    """Gives the processes and what says whether they were asked to stop, within a `with` block: for
    a run that saves, signals ask it.

    Raises NodeError where a host can't serve, CheckpointError where model.verify finds a file that
    is not as it was.
    """
    saves = config.checkpoint.every > 0
    signals = preemption.listening() if saves else nullcontext()
    started = process_group.start(beside=installed().told)
    with (
        started as world,
        watched(config.faults.watchdog_seconds, world.rank),
        named(world),
        signals,
    ):
        nodes.check_nodes(world, disk_space.needed(config))
        integrity.verify_models(world, config)
        if world.is_main:
            start_notes.tell(config)
        tell_balancing(world, config)
        yield world, preemption.agreed if saves else lambda: False
