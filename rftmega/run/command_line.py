"""Parses the command line, and reports the end of a run as messages and exit codes.

Importing this module loads no heavy package.
"""

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rftmega import config as configuration
from rftmega.config.tree import options
from rftmega.config.unknown_options import unknown
from rftmega.core.errors import FINAL_CODES, ConfigError, RanksFailed, RFTMegaError, reported
from rftmega.run.api import check, train
from rftmega.run.hub import fetched
from rftmega.run.option_parser import OptionParser
from rftmega.run.option_reference import option_reference, section_reference, top_sections
from rftmega.runtime.parallel.private import keep_private

FIRST_RECORDS = 8  # records that a dry run reads of each file
HELP = ("-h", "--help")
ONE_SECTION = """`--help rollout` prints one section of the options only; `--help model.lora` and
`--help trainer.steps` print a part of one. Sections: {first},
{second}."""
FROM_PYTHON = """From Python: rftmega.train(CONFIG, processes=N, overrides=["option=value"], rewards=[my_function]),
where my_function(prompts, completions, **columns) gives a number for each completion (docs/rewards.md)."""


def run(description: str | None) -> int:
    """Checks the config named on the command line, then trains in this process or in `--processes`
    ranks of this machine. `description`: the text at the top of --help.

    Returns the exit code, after printing a message for errors that the user can fix.
    """
    try:
        given = arguments(description)
    except ConfigError as error:  # of --help with a section that does not exist
        return reported(error)
    keep_private()  # until this process ends: files are still written at exit
    code = 0
    try:
        if given.elastic or given.node or given.address or given.lease_seconds is not None:
            code = _elastic(given)
        elif given.dry_run:
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


def _elastic(given: argparse.Namespace) -> int:
    """Runs one node of an elastic run, or checks it (`--dry-run`). Returns the exit code.

    Raises ConfigError for an option of elastic runs without --elastic.
    """
    from rftmega.run.elastic.start import LEASE_SECONDS, elastic, limits_of, refusals

    if not given.elastic:
        raise ConfigError(
            "--node, --address and --lease-seconds are for elastic runs. Give --elastic MIN:MAX, or leave them out."
        )
    if given.dry_run:
        limits_of(given.elastic)
        config = configuration.load(given.config, given.overrides)
        if found := refusals(config, given.processes):
            raise ConfigError.listing("This can't be an elastic run", found)
        shown(given)  # of one node
        return 0
    return elastic(
        given.config,
        given.overrides,
        given.processes,
        given.elastic,
        name=given.node,
        address=given.address,
        lease=LEASE_SECONDS if given.lease_seconds is None else given.lease_seconds,
    )


def arguments(description: str | None) -> argparse.Namespace:
    listed = reference(sys.argv[1:])
    if chosen := _chosen_help(sys.argv[1:], listed):
        sys.stdout.write(f"{chosen}\n")
        sys.exit(0)
    names = top_sections()
    shortly = ONE_SECTION.format(first=", ".join(names[:7]), second=", ".join(names[7:]))
    parser = OptionParser(
        description=f"{shortly}\n\n{description or ''}",
        usage="%(prog)s CONFIG [option=value ...] [--processes N] [--dry-run]\n       %(prog)s --help [SECTION]",
        epilog=f"{FROM_PYTHON}\n\n"
        "Options, their defaults and meaning (CONFIG is a YAML file of them):\n" + listed,
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
        "--elastic",
        default="",
        metavar="MIN:MAX",
        help="be one of MIN to MAX nodes, each with --processes ranks: the run goes on with the nodes that are there, in the "
        "layout that suits them (docs/elastic.md). Start this command on each node",
    )
    parser.add_argument(
        "--node", default="", metavar="NAME", help="this node's name (--elastic; the host's)"
    )
    parser.add_argument(
        "--address",
        default="",
        metavar="HOST",
        help="address of this host at which the other nodes reach it (--elastic; that of its name)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=float,
        metavar="S",
        help="a node that gives no sign of life for so long has failed (--elastic; 10)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print layout, batch arithmetic and parameters a rank, read the first records, check the reward, and exit",
    )
    return parser.parse_intermixed_args()


def _chosen_help(argv: Sequence[str], listed: str) -> str:
    """Returns the part of the option reference `listed` that the name after --help chooses; "" if
    no name is there. `argv`: the command line's arguments.

    Raises ConfigError if the name is that of no section, option or file.
    """
    names = [after for word, after in pairwise(argv) if word in HELP]
    if not names or names[0].startswith("-") or "=" in names[0] or Path(names[0]).is_file():
        return ""
    if found := section_reference(names[0], listed):
        return found
    near = difflib.get_close_matches(names[0], top_sections(), n=1)
    raise ConfigError(
        f"--help {names[0]}: {names[0]} is no section. Did you mean {near[0]}?"
        if near
        else f"--help {names[0]}: {unknown(names[0], list(options()))}"
    )


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
    if not set(HELP).intersection(argv) or not files:
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
