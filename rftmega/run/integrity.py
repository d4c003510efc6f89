"""Verifies the checksums of the models' files before they are read, if model.verify is set."""

import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rftmega.checkpoints.reader import is_distributed
from rftmega.config import RunConfig
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.checksums import CHECKSUMS, files_of, known_sums, sum_of, write_sums
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.watchdog import mark

log = logging.getLogger(__name__)


class ChecksumReport(NamedTuple):
    """ChecksumReport is the result of one process: the checksums of the files that it read, and an
    error if there was one.
    """

    host: str
    sums: dict[str, str]
    error: str | None


def verify_models(world: World, config: RunConfig) -> None:
    """Verifies the files of the run's models, if model.verify is set. A collective; the processes of
    a host divide the files among them.

    Raises CheckpointError, the same on every process, if a file has changed, is missing or has no
    checksum. For a folder without checksums, they are computed and written.
    """
    if not config.model.verify:
        return
    folders = [config.model.path]
    if config.algorithm.advantage.needs_critic and config.critic.path:
        folders.append(config.critic.path)
    folders += [model.path for model in config.reward.scoring_models().values() if model.path]
    folders += [teacher.path for teacher in config.algorithm.teachers if teacher.loads]
    for folder in dict.fromkeys(map(Path, folders)):
        if not is_distributed(folder):  # verified piece by piece when it is read
            _verify(world, folder)


def _verify(world: World, folder: Path) -> None:
    began = time.monotonic()
    known, sums, error = dict[str, str](), dict[str, str](), None
    try:
        known = known_sums(folder)
        present = {path.name for path in files_of(folder)}
        names = sorted(known.keys() & present) if known else sorted(present)
        for name in names[world.local_rank :: world.local_size]:
            sums[name] = sum_of(folder / name, known.get(name, "xxh3").partition(":")[0], step=mark)
        missing = sorted(known.keys() - present)
        strangers = sorted(
            name for name in present - known.keys() if known and name.endswith(".safetensors")
        )
        if missing or strangers:
            said = [f"{name} is missing" for name in missing] + [
                f"{name} has none" for name in strangers
            ]
            error = f"of the files with checksums {', '.join(said)}"
    except CheckpointError as raised:
        error = str(raised)
    reports = gather_objects(ChecksumReport(socket.gethostname(), sums, error))
    if wrong := complaints(reports, known):
        raise CheckpointError.listing(
            f"{folder} is not as it was (model.verify). Restore it; or, where you changed it, remove its {CHECKSUMS}, which is "
            "written anew",
            wrong,
        )
    if not known:
        _first_time(world, folder, reports)
    if world.is_main:
        count, seconds = (
            len({name for report in reports for name in report.sums}),
            time.monotonic() - began,
        )
        what = "are as they were" if known else f"have checksums now, in {CHECKSUMS}"
        log.info("%s: %d files %s (%.1f s)", folder, count, what, seconds)


def _first_time(world: World, folder: Path, reports: Sequence[ChecksumReport]) -> None:
    """Writes the checksums of a folder that had none, collected from the `reports` of all
    processes; every process raises CheckpointError if the main process can't write them.
    """
    error = None
    if world.is_main:
        try:
            write_sums(
                folder, {name: found for report in reports for name, found in report.sums.items()}
            )
        except CheckpointError as raised:
            error = str(raised)
    if errors := list(filter(None, gather_objects(error))):
        raise CheckpointError(
            f"{errors[0]} model.verify=true needs it once; rftmega convert checksums writes it, too."
        )


def complaints(reports: Sequence[ChecksumReport], known: dict[str, str]) -> list[str]:
    """Returns a message for each error in the `reports` of all processes, and for each file whose
    checksum differs from `known` (file name -> expected checksum) or, if `known` is empty, between
    hosts.
    """
    found = dict.fromkeys(f"on {report.host}: {report.error}" for report in reports if report.error)
    first: dict[str, tuple[str, str]] = {}
    for report in reports:
        for name, said in report.sums.items():
            if known and said != known[name]:
                found[f"{name} on {report.host} has checksum {said}, not {known[name]}"] = None
            host, other = first.setdefault(name, (report.host, said))
            if not known and said != other:
                found[f"{name} on {report.host} has checksum {said}, on {host} {other}"] = None
    return list(found)
