"""Sets up one process of a run: process group, host checks, watchdog and stop signals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rftmega.config import RunConfig
from rftmega.model_providers.optional_cuda_packages import installed
from rftmega.run import disk_space, integrity, start_notes
from rftmega.run.ignored_load_balancing import tell_balancing
from rftmega.runtime.parallel import nodes, preemption, process_group
from rftmega.runtime.parallel.lease import named
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.watchdog import watched


@contextmanager
def joined(config: RunConfig) -> Iterator[tuple[World, Callable[[], bool]]]:
    """Joins the process group and checks the host, within a `with` block. Yields the World and a
    function that returns whether any process was asked by a signal to stop (always False in a run
    that saves no checkpoints).

    Raises NodeError if a host can't be used, CheckpointError if model.verify finds a file that has
    changed.
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
