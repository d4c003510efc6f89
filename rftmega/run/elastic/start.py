"""Starts one node of an elastic run from a config: `rftmega train CONFIG --elastic MIN:MAX`."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError, LockedError, NodeFault
from rftmega.run import api
from rftmega.run.elastic.decision import NodeLimits
from rftmega.run.hub import fetched
from rftmega.run.hub_upload import claim, upload
from rftmega.run.train import task_of

LEASE_SECONDS = 10.0  # by default
SHORTEST = 2.0  # seconds of a lease
BEGAN = "RFTMEGA_ELASTIC_BEGAN"  # a file that was written when all nodes were started


def elastic(
    path: str | Path,
    overrides: Sequence[str],
    processes: int | None,
    nodes: str,
    *,
    name: str = "",
    address: str = "",
    lease: float = LEASE_SECONDS,
) -> int:
    """Runs one node of an elastic run with `processes` ranks until the run ends. Returns the exit
    code. `nodes`: fewest and most nodes, as "2:4"; `name`, `address` and `lease`: see `Supervisor`.

    Raises ConfigError if the config can't be run so.
    """
    limits = limits_of(nodes)
    if not lease >= SHORTEST:
        raise ConfigError(f"--lease-seconds {lease:g} must be at least {SHORTEST:g}.")
    config = fetched(configuration.load(path, overrides))
    if found := refusals(config, processes):
        raise ConfigError.listing("This can't be an elastic run", found)
    assert processes is not None
    claim(config)
    began = os.environ.get(BEGAN)
    from rftmega.run import preflight
    from rftmega.run.elastic.supervisor import Supervisor

    preload = ["rftmega.run.preloaded", *preflight.slow_modules(config)]
    supervisor = Supervisor(
        config,
        processes,
        limits,
        elastic_rank,
        preload=preload,
        name=name,
        address=address,
        lease=lease,
        began=Path(began) if began else None,
    )
    return supervisor.run()


def limits_of(nodes: str) -> NodeLimits:
    """Returns the fewest and most nodes of the text "MIN:MAX". Raises ConfigError for another."""
    found = re.fullmatch(r"(\d+):(\d+)", nodes.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(
            f"--elastic {nodes} must be the fewest and the most nodes, as 2:4, with 1 <= fewest <= most."
        )
    return NodeLimits(int(found[1]), int(found[2]))


def refusals(config: RunConfig, processes: int | None) -> list[str]:
    """Returns why the config can't be run with --elastic, as texts."""
    found = []
    if processes is None or processes < 1:
        found.append("--elastic needs --processes: the number of ranks on this node.")
    if not config.checkpoint.every:
        found.append(
            "--elastic needs checkpoint.every, since a run goes on from its checkpoints. Set it to the number of steps that "
            "a failure may cost, e.g. checkpoint.every=10."
        )
    if config.checkpoint.resume == "none":
        found.append(
            "checkpoint.resume=none would begin anew after each failure. Leave it at auto."
        )
    if config.faults.max_restarts:
        found.append(
            "faults.max_restarts is for runs without --elastic, which starts ranks again by itself. Set it to 0."
        )
    remote = config.rollout.addresses or config.rollout.server_list
    if config.strategy == "separate" and not remote:
        found.append(
            "strategy=separate starts its servers on one node, with which they would fail. Start them with `rftmega serve`, and "
            "set rollout.server_list or rollout.addresses; or set strategy=colocated."
        )
    return found


def elastic_rank(config: RunConfig, lease: float) -> int:
    """Runs one rank of a round. Returns its exit code.

    The run's folders are locked for as long as a lease, so that the next round need not wait longer
    for a lock that a failed node has left.
    """
    api.prepare()
    try:
        with api.folders_locked(config, lease=lease):
            code = task_of(config)(config)
    except LockedError as error:  # by ranks of a node that could not be told that it is out
        raise NodeFault(str(error)) from error
    if os.environ["RANK"] == "0" and code == 0:
        upload(config)
    return code
