"""Chooses the layout of an elastic run for each number of nodes that may be available.

The config's own layout is kept where it works and fits; otherwise the planner's quickest is taken.
The results don't depend on it.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.core.errors import RFTMegaError
from rftmega.runtime import device

QUIET = 19  # of os.nice: ranks come first
RESERVED = 4e9  # bytes of a CUDA device that are nobody's, as in `rftmega plan`
# rates that only compare layouts: those of an H100 with NVLink and a 400 Gb/s card
FLOPS, MEMORY, NVLINK, NIC, HOST = 989e12, 3350e9, 450e9, 50e9, 50e9


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
    budget = Budget(share, 0.0 if on_cpu else RESERVED)
    return Machine(world, budget, Speeds(FLOPS, MEMORY, NVLINK, NIC, HOST, processes))


def read_layouts(file: Path) -> dict[int, dict[str, Any] | str]:
    """Returns what `choose_layouts` has written so far."""
    try:
        found = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {int(size): changes for size, changes in found.items()}
