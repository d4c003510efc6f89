"""How a run is started and what its end says: arguments, refusals, `--processes`, exit codes. Importing this costs nothing."""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.errors import FINAL_CODES, exit_code_of

Train = Callable[[RunConfig], int]
"""Of one process; gives its exit code, and is found by its name in another process."""


def run(train: Train, description: str | None) -> int:
    """Has `train` done what the command line says. The exit code, with a message for what the user can mend."""
    given = arguments(description)
    try:
        code = exit_code_of(start, given, train)
    except KeyboardInterrupt:
        return 130
    if code in FINAL_CODES and (mark := os.environ.get("RFTMEGA_REFUSED")):  # tools/run.sbatch
        with contextlib.suppress(OSError):
            Path(mark).write_text(f"{code}\n")
    return code


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description,
        usage="train_rl.py CONFIG [option=value ...] [--processes N] [--dry-run]",
        epilog="Options, their defaults and meaning (CONFIG is a YAML file of them):\n" + configuration.option_reference(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="option=value", default=[], help="dotted overrides, e.g. parallel.tensor=2"
    )
    parser.add_argument("--processes", type=int, help="start this many processes here (otherwise launch with torchrun)")
    parser.add_argument("--dry-run", action="store_true", help="print layout, batch arithmetic and parameters a rank, and exit")
    return parser.parse_intermixed_args()


def start(given: argparse.Namespace, train: Train) -> int:
    """Checks the config, then trains: here, or in `--processes` ranks of this machine. The exit code."""
    from rftmega.parallel import stop
    from rftmega.parallel.launch import check_launcher, launched_size
    from rftmega.strategy import preflight

    check_launcher()
    processes = launched_size() if given.processes is None else given.processes
    config = configuration.load(given.config, given.overrides)
    saves = config.checkpoint.every > 0
    if not saves:
        stop.unlisten()
    preflight.preflight(config, processes, local=given.processes is not None)
    if given.dry_run:
        sys.stdout.write(preflight.dry_run(config, processes) + "\n")
        return 0
    if given.processes is None:
        return train(config)
    if stop.asked():  # ranks would each have to agree on it
        return config.faults.requeue_code
    from rftmega.parallel.local import launch

    preload = ["rftmega.strategy.preloaded", *preflight.engine_modules(config)]
    return launch(processes, rank, train, config, preload=preload, max_restarts=config.faults.max_restarts, stops=saves)


def rank(train: Train, config: RunConfig) -> int:
    """One process of a run started by `--processes`; its exit code."""
    prepare()
    return train(config)


def prepare() -> None:
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("rftmega").setLevel(logging.INFO)
