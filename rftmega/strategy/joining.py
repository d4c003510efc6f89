"""One process of a run: among the others, on a host that was looked at, watched, and able to hear that it is to stop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from model_providers.installed import installed
from rftmega.config import RunConfig
from rftmega.parallel import launch, nodes, stop
from rftmega.parallel.launch import World
from rftmega.parallel.progress import watched
from rftmega.parallel.standing import named
from rftmega.strategy import disk, integrity


@contextmanager
def joined(config: RunConfig) -> Iterator[tuple[World, Callable[[], bool]]]:
    """Within, gives the processes and what says whether they were asked to stop: for a run that saves, signals ask it.

    Raises NodeError where a host can't serve, CheckpointError where model.verify finds a file that is not as it was.
    """
    saves = config.checkpoint.every > 0
    signals = stop.listening() if saves else nullcontext()
    started = launch.start(beside=installed().told)
    with started as world, watched(config.faults.watchdog_seconds, world.rank), named(world), signals:
        nodes.check_nodes(world, disk.needed(config))
        integrity.verify_models(world, config)
        yield world, stop.agreed if saves else lambda: False
