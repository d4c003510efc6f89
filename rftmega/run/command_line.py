"""Parses the command line, and reports the end of a run as messages and exit codes.

Importing this module loads no heavy package.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rftmega import config as configuration
from rftmega.core.errors import FINAL_CODES, ConfigError, RanksFailed, RFTMegaError, reported
from rftmega.run.api import check, train
from rftmega.run.hub import fetched
from rftmega.run.option_reference import option_reference
from rftmega.runtime.parallel.private import keep_private

FIRST_RECORDS = 8  # records that a dry run reads of each file
FROM_PYTHON = """From Python: rftmega.train(CONFIG, processes=N, overrides=["option=value"], rewards=[my_function]),
where my_function(prompts, completions, **columns) gives a number for each completion (docs/rewards.md)."""


def run(description: str | None) -> int:
    """Checks the config named on the command line, then trains in this process or in `--processes`
    ranks of this machine. `description`: the text at the top of --help.

    Returns the exit code, after printing a message for errors that the user can fix.
    """
    given = arguments(description)
    keep_private()  # until this process ends: files are still written at exit
    code = 0
    try:
        if given.dry_run:
            shown(given)
        else:
            result = train(given.config, processes=given.processes, overrides=given.overrides)
            code = result.exit_code
    except RanksFailed as error:  # the launcher has reported the cause
        code = error.exit_code
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
        usage="%(prog)s CONFIG [option=value ...] [--processes N] [--dry-run]",
        epilog=f"{FROM_PYTHON}\n\n"
        "Options, their defaults and meaning (CONFIG is a YAML file of them):\n"
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
        help="print layout, batch arithmetic and parameters a rank, read the first records, check the reward, and exit",
    )
    return parser.parse_intermixed_args()


def reference(argv: Sequence[str]) -> str:
    """Returns the option reference that --help prints, including the options of plugins if the
    CONFIG on the command line names any. `argv`: the command line's arguments.
    """
    files = [
        word
        for word in argv
        if not word.startswith("-") and "=" not in word and Path(word).is_file()
    ]
    overrides = [word for word in argv if not word.startswith("-") and "=" in word]
    if not {"-h", "--help"}.intersection(argv) or not files:
        return option_reference()
    try:
        return option_reference(configuration.plugins_of(files[0], overrides))
    except ConfigError as error:
        return f"{option_reference()}\n\n{error}"


def shown(given: argparse.Namespace) -> None:
    """Prints layout, batch arithmetic and parameters per rank, and checks the first data records
    and the reward (`--dry-run`). `given`: the parsed command line.
    """
    from rftmega.run import preflight
    from rftmega.run.train import look
    from rftmega.runtime.parallel.process_group import launched_size

    config = fetched(configuration.load(given.config, given.overrides))
    check(config, given.processes)
    processes = launched_size() if given.processes is None else given.processes
    sys.stdout.write(preflight.dry_run(config, processes) + "\n")
    sys.stdout.write(f"looked at   {look(config, FIRST_RECORDS)}\n")
