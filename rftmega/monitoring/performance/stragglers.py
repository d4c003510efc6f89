"""Detection of a process for which all others wait in every step (straggler), because of a slow
device or a busy host.
"""

import logging
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer
from rftmega.runtime.parallel.collectives import gather_objects

TIMES = 3.0  # times the median's work
SHARE = 0.1  # share of the step that is lost
STEPS = 3  # in a row: a single one may be chance
AGAIN = 100  # steps before the same warning is repeated
log = logging.getLogger(__name__)


class Straggler(NamedTuple):
    """Straggler names a process that is much slower than the others in a phase of a step, by its
    rank and the phase.
    """

    phase: str
    rank: int


class Stragglers(Observer):
    """Stragglers is a callback that logs a warning, on the main process, about a process that is
    slow in several successive steps. It runs on every process, after `Throughput`, whose metrics it
    reads.
    """

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self.hosts = gather_objects(socket.gethostname())
        self.streaks: dict[Straggler, int] = {}
        self.told: dict[Straggler, int] = {}  # straggler -> step of its last warning

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.streaks = {each: self.streaks.get(each, 0) + 1 for each in stragglers(metrics)}
        for each, streak in self.streaks.items():
            if streak >= STEPS and trainer.step - self.told.get(each, -AGAIN) >= AGAIN:
                self.told[each] = trainer.step
                self._warn(each, streak, metrics)

    def _warn(self, each: Straggler, streak: int, metrics: Metrics) -> None:
        if dist.get_rank() == 0:
            log.warning(
                "rank %d on %s is slow: in %s it worked for %.1f s, the median process for %.1f s; the %d. step in a row. "
                "docs/fault_tolerance.md says what to do.",
                each.rank,
                self.hosts[each.rank],
                each.phase,
                metrics[f"work_{each.phase}_max"],
                metrics[f"work_{each.phase}_median"],
                streak,
            )


def stragglers(metrics: Metrics) -> list[Straggler]:
    """Returns the slow processes in one step's metrics: for each phase the process with the most
    work, if its working time is more than TIMES the median and the difference exceeds the share
    SHARE of the step's time.
    """
    phases = [name.removeprefix("seconds_") for name in metrics if name.startswith("seconds_")]
    step = sum(metrics[f"seconds_{phase}"] for phase in phases)
    found = []
    for phase in phases:
        if f"work_{phase}" not in metrics:
            continue
        longest, median = metrics[f"work_{phase}_max"], metrics[f"work_{phase}_median"]
        if longest > TIMES * median and longest - median > SHARE * step:
            found.append(Straggler(phase, int(metrics[f"work_{phase}_slowest"])))
    return found
