"""Generates the step of a Slurm job that runs vLLM servers on separate nodes."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftmega.config import RunConfig

TEMPLATE = Path(__file__).with_name("servers.sbatch")
SERVER_LIST, LISTEN = '"$RFTMEGA_SERVER_LIST"', '"$MASTER_ADDR"'  # shell variables of the script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server-nodes",
        type=int,
        default=0,
        metavar="M",
        help="nodes beside those of --nodes, for vLLM servers (strategy=separate, rollout.transport=network)",
    )
    parser.add_argument(
        "--servers-per-node",
        type=int,
        default=1,
        metavar="K",
        help="each of rollout.tensor processes (1)",
    )


def overrides(chosen: argparse.Namespace, server_list: str, listen: str) -> list[str]:
    """Returns the config options by which the trainer finds the servers; an empty list without
    server nodes. `chosen`: the parsed command line; `server_list`, `listen`: values of the options
    rollout.server_list and rollout.listen.
    """
    if not chosen.server_nodes:
        return []
    return [f"rollout.server_list={server_list}", f"rollout.listen={listen}"]


def problems(chosen: argparse.Namespace, config: "RunConfig") -> list[str]:
    """Returns a message, with a remedy, for each problem of the server nodes. `chosen`: the parsed
    command line.
    """
    if not chosen.server_nodes:
        return []
    found = [
        f"--{name.replace('_', '-')} {getattr(chosen, name)} must be at least 1."
        for name in ("server_nodes", "servers_per_node")
        if getattr(chosen, name) < 1
    ]
    rollout = config.rollout
    if config.strategy != "separate" or rollout.transport != "network":
        found.append(
            f"--server-nodes {chosen.server_nodes} needs strategy=separate and rollout.transport=network, not "
            f"strategy={config.strategy} and rollout.transport={rollout.transport}."
        )
    needed = chosen.servers_per_node * rollout.tensor
    if 0 < chosen.gpus_per_node < needed:
        found.append(
            f"--servers-per-node {chosen.servers_per_node} of rollout.tensor={rollout.tensor} processes are more than "
            f"--gpus-per-node {chosen.gpus_per_node}; each needs its own."
        )
    return found


def placed(chosen: argparse.Namespace) -> list[str]:
    """Returns the srun options that keep the trainer on its own nodes; an empty list without server
    nodes. `chosen`: the parsed command line.
    """
    if not chosen.server_nodes:
        return []
    per_node = chosen.processes_per_node
    return [
        f"--nodes={chosen.nodes}",
        "--relative=0",
        f"--ntasks={chosen.nodes * per_node}",
        f"--ntasks-per-node={per_node}",
    ]


def values(
    chosen: argparse.Namespace, folder: Path, python: str, options: list[str]
) -> dict[str, str]:
    """Returns the values of the placeholders SERVERS and END in run.sbatch: the shell code that
    starts and ends the servers; empty without server nodes.

    `chosen`: the parsed command line; `folder`: of the logs; `python`: path of the interpreter;
    `options`: srun options that the servers' and the trainer's step share.
    """
    if not chosen.server_nodes:
        return {"SERVERS": "", "END": ""}
    srun = [
        f"--nodes={chosen.server_nodes}",
        f"--relative={chosen.nodes}",
        f"--ntasks={chosen.server_nodes}",
        "--ntasks-per-node=1",
        shlex.quote(f"--output={folder}/%j-servers-%n.log"),
        *options,
    ]
    serve = [python, "-u", "-m", "rftmega", "serve", chosen.config, *chosen.overrides]
    serve += [f"--servers={chosen.servers_per_node}", f"--logs={folder}"]
    given = {
        "SERVER_NODES": str(chosen.server_nodes),
        "LOGS": str(folder),
        "SERVER_SRUN": " \\\n    ".join(srun),
        "SERVE": shlex.join(serve),
    }
    text = TEMPLATE.read_text()
    for name, value in given.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return {"SERVERS": text, "END": 'kill "$servers" 2> /dev/null; wait "$servers"\n'}
