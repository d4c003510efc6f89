"""Chooses the layout of an elastic run for each number of nodes that may be available.

The config's own layout is kept where it works and fits; otherwise the planner's quickest is taken.
The results don't depend on it.
"""

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError, RFTMegaError
from rftmega.run.elastic.decision import NodeLimits
from rftmega.run.local_launcher import main_of_ranks
from rftmega.run.planning import usual_device
from rftmega.runtime import device

GB = 1e9
QUIET = 19  # of os.nice: ranks come first
log = logging.getLogger(__name__)


class Layouts:
    """Layouts are the layouts of the run for every number of nodes."""

    def __init__(self, config: RunConfig, limits: NodeLimits, processes: int, file: Path):
        """`file`: where a process of its own writes what it has found."""
        self._config, self._limits, self._processes = config, limits, processes
        self._file = file
        self._file.unlink(missing_ok=True)
        self._found: dict[int, dict[str, Any] | str] = {}
        self._started: set[int] = set()
        self._worker: Any = None

    def best(self, nodes: int) -> tuple[int, Mapping[str, Any]]:
        """Returns the largest number of nodes, at most `nodes`, that has a layout, and its changes
        of options. Computes it if nobody did, which takes seconds.

        Raises ConfigError if no number from the fewest nodes on has one.
        """
        reasons: list[str] = []
        for size in range(nodes, self._limits.least - 1, -1):
            found = self._of(size)
            if not isinstance(found, str):
                for reason in reasons:
                    log.warning("%s", reason)
                return size, found
            reasons.append(f"With {size} node(s) of {self._processes} rank(s) each: {found}")
        raise ConfigError(reasons[0])

    def known(self, nodes: int) -> int:
        """Returns the largest number of nodes, at most `nodes`, that is known to have a layout; 0 if
        none is known yet.
        """
        self._found |= read_layouts(self._file)
        sizes = [size for size, found in self._found.items() if not isinstance(found, str)]
        return max((size for size in sizes if size <= nodes), default=0)

    def prepare(self) -> None:
        """Computes in the background the layouts that are not known yet."""
        self._found |= read_layouts(self._file)
        wanted = range(self._limits.most, self._limits.least - 1, -1)
        missing = [size for size in wanted if size not in self._found]
        if missing and not self._working():
            self._start(missing)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.join()
            self._worker = None
        self._file.unlink(missing_ok=True)

    def _of(self, size: int) -> dict[str, Any] | str:
        while True:
            working = self._working()
            self._found |= read_layouts(self._file)
            if size in self._found:
                return self._found[size]
            if not working:
                if size in self._started:
                    self._found[size] = "the planner ended without a result"
                else:
                    self._start([size])
            time.sleep(0.05)

    def _working(self) -> bool:
        return self._worker is not None and self._worker.is_alive()

    def _start(self, sizes: Sequence[int]) -> None:
        self._started.update(sizes)
        context: Any = multiprocessing.get_context(device.current().start_method)
        given = (self._config, list(sizes), self._processes, self._file)
        with main_of_ranks():
            self._worker = context.Process(target=choose_layouts, args=given)
            self._worker.start()


def choose_layouts(config: RunConfig, sizes: Iterable[int], processes: int, file: Path) -> None:
    """Adds to `file` the layout for each number of nodes in `sizes`, with `processes` ranks each,
    as a JSON object: number of nodes -> option changes, or the reason (a text) why there is none.

    The file is replaced after each number, so that a reader need not wait for all of them. To be
    called in a process of its own.
    """
    os.nice(QUIET)
    found: dict[str, Any] = {str(size): changes for size, changes in read_layouts(file).items()}
    for size in sizes:
        try:
            found[str(size)] = layout_of(config, size * processes, processes)
        except RFTMegaError as error:
            found[str(size)] = str(error)
        except Exception as error:  # a fault of the planner concerns this number alone
            found[str(size)] = f"the planner failed: {error!r}"
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        draft.write_text(json.dumps(found))
        os.replace(draft, file)


def layout_of(config: RunConfig, world: int, processes: int) -> dict[str, Any]:
    """Returns the option changes with which the run works on `world` ranks, `processes` of them on
    each node; {} if it works as it is.

    Raises ConfigError if there is no such layout.
    """
    from rftmega.run import preflight
    from rftmega.run.planning.fit import changed, misfits, push_bound, refused
    from rftmega.run.planning.models import POLICY, models_of
    from rftmega.run.planning.search import found_layout

    machine = machine_of(world, processes)
    refusal: RFTMegaError | None = None
    try:
        preflight.preflight(config, world)
        models = models_of(config)
        buffers = push_bound(models[POLICY], config) if POLICY in models else 0
        if not refused(models, config, machine) and not misfits(models, config, machine, buffers):
            return {}
    except RFTMegaError as error:
        refusal = error
        models = models_of(config)
    found = found_layout(models, config, machine, "quickest")
    if found.proposal is None:
        raise refusal or RFTMegaError(found.why)
    changes = dict(found.proposal.changes)
    preflight.preflight(changed(config, changes), world)
    return changes


def machine_of(world: int, processes: int) -> Any:
    """Returns the planner's Machine of `world` devices like this host's, `processes` on a node."""
    from rftmega.run.planning.fit import Machine
    from rftmega.run.planning.memory import Budget
    from rftmega.run.planning.times import Speeds

    here = device.current()
    on_cpu = here.devices() is None
    share = here.capacity() / (processes if on_cpu else 1)
    budget = Budget(share, 0.0 if on_cpu else usual_device.RESERVED_GB * GB)
    # rates only compare layouts
    speeds = Speeds(
        usual_device.TFLOPS * 1e12,
        usual_device.HBM_GBS * GB,
        usual_device.NVLINK_GBS * GB,
        usual_device.NIC_GBS * GB,
        usual_device.PCIE_GBS * GB,
        processes,
    )
    return Machine(world, budget, speeds)


def read_layouts(file: Path) -> dict[int, dict[str, Any] | str]:
    """Returns what `choose_layouts` has written so far."""
    try:
        found = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {int(size): changes for size, changes in found.items()}
