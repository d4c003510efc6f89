"""Starts a run and reports its end: arguments, refusals, `--processes`, exit codes.

Importing this costs nothing.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rftmega import config as configuration
from rftmega.config import RunConfig
from rftmega.errors import FINAL_CODES, ConfigError, RFTMegaError, reported
from rftmega.parallel.folder_lock import locked
from rftmega.parallel.orphans import end_with_parent
from rftmega.parallel.private import keep_private

Train = Callable[[RunConfig], int]
"""Of one process; gives its exit code, and is found by its name in another process."""


def run(train: Train, description: str | None) -> int:
    """Checks the config of the command line, then trains: here, or in `--processes` ranks of this
    machine.

    Returns the exit code, after a message for what the user can mend.
    """
    given = arguments(description)
    code = 0
    try:
        config = checked(given)
        if given.dry_run:
            code = shown(given, config)
        elif given.processes is not None:
            code = launched(given.processes, train, config)
        else:
            end_with_torchrun()
            with folders_locked(config):
                code = train(config)
    except RFTMegaError as error:
        code = reported(error)
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
        epilog="Options, their defaults and meaning (CONFIG is a YAML file of them):\n"
        + reference(sys.argv[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="option=value",
        default=[],
        help="dotted overrides, e.g. parallel.tensor=2",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="start this many processes here (otherwise launch with torchrun)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print layout, batch arithmetic and parameters a rank, and exit",
    )
    return parser.parse_intermixed_args()


def reference(argv: Sequence[str]) -> str:
    """Returns the options that --help shows: those of a user's own parts, too, where a CONFIG that
    has plugins is given.
    """
    files = [
        word
        for word in argv
        if not word.startswith("-") and "=" not in word and Path(word).is_file()
    ]
    overrides = [word for word in argv if not word.startswith("-") and "=" in word]
    if not {"-h", "--help"}.intersection(argv) or not files:
        return configuration.option_reference()
    try:
        return configuration.option_reference(configuration.plugins_of(files[0], overrides))
    except ConfigError as error:
        return f"{configuration.option_reference()}\n\n{error}"


def checked(given: argparse.Namespace) -> RunConfig:
    """Reads the config and refuses what can't run. Raises ConfigError, or another error of ours."""
    from rftmega.launch import preflight
    from rftmega.parallel import preemption
    from rftmega.parallel.process_group import check_launcher, launched_size

    keep_private()
    check_launcher()
    processes = launched_size() if given.processes is None else given.processes
    config = configuration.load(given.config, given.overrides)
    if not config.checkpoint.every:
        preemption.unlisten()
    preflight.preflight(config, processes, local=given.processes is not None)
    return config


def shown(given: argparse.Namespace, config: RunConfig) -> int:
    """Prints layout, batch arithmetic and parameters a rank."""
    from rftmega.launch import preflight
    from rftmega.parallel.process_group import launched_size

    processes = launched_size() if given.processes is None else given.processes
    sys.stdout.write(preflight.dry_run(config, processes) + "\n")
    return 0


def launched(processes: int, train: Train, config: RunConfig) -> int:
    """Trains in so many ranks of this machine. Returns the exit code."""
    from rftmega.launch import preflight
    from rftmega.launch.local_launcher import launch
    from rftmega.parallel import preemption

    if preemption.asked():  # ranks would each have to agree on it
        return config.faults.requeue_code
    preload = ["rftmega.launch.preloaded", *preflight.engine_modules(config)]
    restarts, saves = config.faults.max_restarts, config.checkpoint.every > 0
    with folders_locked(config):
        return launch(
            processes, rank, train, config, preload=preload, max_restarts=restarts, stops=saves
        )


def end_with_torchrun() -> None:
    """Ends this rank with torchrun, where that started it: peers of a rank whose agent was killed
    would wait for ever.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid(), signal.SIGKILL)


@contextlib.contextmanager
def folders_locked(config: RunConfig) -> Iterator[None]:
    """Within, no other run writes where this one does. The launcher holds the locks, which outlives
    its ranks; without one the first rank. Raises LockedError.
    """
    folders = {Path(config.trainer.output).resolve()}
    if config.checkpoint.every and config.checkpoint.folder:
        folders.add(Path(config.checkpoint.folder).resolve())
    with contextlib.ExitStack() as held:
        if os.environ.get("RANK", "0") == "0":
            for folder in sorted(folders):
                held.enter_context(locked(folder, "run"))
        yield


def rank(train: Train, config: RunConfig) -> int:
    """One process of a run started by `--processes`; its exit code."""
    prepare()
    return train(config)


def prepare() -> None:
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("rftmega").setLevel(logging.INFO)
