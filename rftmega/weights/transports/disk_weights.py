"""Weight sync through a shared file system, for engines that share nothing else with the trainer.

Each process writes its share of the slices as safetensors; together, the processes write every
element once. Slices that have not changed since the last push are not written again: the manifest
names the earlier file.
"""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rftmega.core.errors import EngineFault
from rftmega.core.shards import Shard, whole
from rftmega.core.types import SliceChecksums
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.watchdog import mark
from rftmega.weights.plan import Balance
from rftmega.weights.slice_sums import sum_of
from rftmega.weights.slices import TensorSlice, planned
from rftmega.weights.transports import pushed_folders
from rftmega.weights.transports.remote_weights import (
    Asked,
    RemoteReceivers,
    RemoteWeights,
    WaitingEngine,
)
from rftmega.weights.transports.transfer_plan import told_tensors

MANIFEST = "manifest.json"
KEPT = 2  # versions: a slow reader may still read the previous one
READER = -1  # a rank that is no trainer process


class DiskWeights(RemoteWeights):
    """DiskWeights writes one folder per push, from which engines read the weights."""

    run = ""

    def __init__(
        self,
        shards: Sequence[Shard],
        engines: RemoteReceivers,
        *,
        bucket_bytes: int,
        folder: str | Path,
        run: str = "",
    ):
        """`folder`: parent of the push folders, visible under the same path to every process and
        engine. `run`: name of the run that pushes.
        """
        super().__init__(shards, engines, bucket_bytes=bucket_bytes)
        self.run = run
        self.folder = Path(folder).absolute()
        self._writes = own_writes(self.buckets, self.rank)
        self._joined: set[str] = set()
        self._entries: dict[str, list[Any]] = {}  # of this process's slices in the last push
        self._written = 0
        self._manifests: dict[str, set[str]] = {}  # version's folder -> folders that it names

    def checksums(self) -> list[SliceChecksums]:
        """Returns for every slice of the last push its checksums: of the trainer's weights now, as
        sent and as received; a collective. The policy's weights must be on the device. An engine
        refuses a slice whose checksum is not the one in the manifest, so the received and sent
        checksums are equal.
        """
        self.shards.look_again()
        found = []
        for bucket in self._writes:
            for each in bucket:
                entry = self._entries.get(str(each))
                sent = None if entry is None else entry[-1]
                held = sum_of(self.shards.slice_of(each))
                found.append(
                    SliceChecksums(each.name, each.box, self.rank, READER, held, sent, sent)
                )
        return [each for theirs in gather_objects(found) for each in theirs]

    def _linked(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        names = [each.name for each in waiting]
        tensors = [told_tensors(planned(bucket)) for bucket in self.buckets]

        def joined() -> list[str]:
            new = [name for name in names if name not in self._joined]
            return self._those(self._asked(new, self.engines.join, {"buckets": tensors}))

        self._joined.update(self._first(joined))
        return [name for name in names if name in self._joined]

    def _keep(self, names: set[str]) -> None:
        self._joined &= names

    def _brought(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        draft = self.folder / pushed_folders.folder_name(version, self.run)
        error = ""
        try:
            self._write(draft)
        except OSError as raised:
            error = f"Weights can't be written to {draft}, which needs room and rights: {raised}"
        told = gather_objects((error, self._written, self._entries))
        if errors := [each for each, _, _ in told if each]:
            self._entries = {}  # what was written is not whole
            raise EngineFault(f"{errors[0]} Push {version} did not happen.")
        self._first(lambda: self._settle(draft, version, [entries for _, _, entries in told]))
        told_folder = {"version": version, "folder": str(draft)}
        moved = sum(written for _, written, _ in told)
        return moved, self._asked(names, self.engines.receive, told_folder)

    def _least_bytes(self, landed: Sequence[str]) -> int:
        """Returns the size in bytes of all weights; since unchanged slices are not written,
        `push_ratio` may be less than 1.
        """
        return sum(tensor.bytes for tensor in self.tensors)

    def _forget(self, names: set[str]) -> None:
        self._joined -= names
        if names:  # perhaps of what they found in the files
            self._entries = {}

    def _write(self, draft: Path) -> None:
        """Writes this process's changed slices into `draft`, one file per bucket."""
        draft.mkdir(parents=True, exist_ok=True)
        pushed_folders.mark(draft, self.run)
        entries: dict[str, list[Any]] = {}
        self._written = self.buffer_bytes = 0
        for number, bucket in enumerate(self._writes):
            mark()
            file = f"{draft.name}/bucket-{number}-from-{self.rank}.safetensors"
            changed = {}
            for each, elements in zip(bucket, self.shards.slices_of(bucket), strict=True):
                key, total = str(each), sum_of(elements)
                before = self._entries.get(key)
                if before is not None and before[-1] == total:
                    entries[key] = before
                    continue
                entries[key] = [each.name, file, key, [list(edges) for edges in each.box], total]
                changed[key] = elements.detach().contiguous().cpu().clone()
            size = sum(elements.nbytes for elements in changed.values())
            if changed:
                save_file(changed, self.folder / file)
            self._written += size
            self.buffer_bytes = max(self.buffer_bytes, size)
        self._entries = entries

    def _settle(self, draft: Path, version: int, entries: Sequence[dict[str, list[Any]]]) -> None:
        """Writes the manifest, which completes the push, and removes the folders of older pushes
        that no kept manifest refers to. `entries`: the manifest entries of each process's slices.

        Raises EngineFault if the manifest can't be written.
        """
        slices: dict[str, list[Any]] = defaultdict(list)
        for theirs in entries:
            for name, *rest in theirs.values():
                slices[name].append(rest)
        incomplete = draft / f"{MANIFEST}.incomplete"
        try:
            incomplete.write_text(json.dumps({"version": version, "tensors": slices}))
            os.replace(incomplete, draft / MANIFEST)
        except OSError as error:
            raise EngineFault(f"{draft / MANIFEST} can't be written: {error}") from error
        named = {file.partition("/")[0] for own in slices.values() for file, *_ in own}
        self._manifests.pop(draft.name, None)  # of a repeated push
        self._manifests[draft.name] = named | {draft.name}
        while len(self._manifests) > KEPT:
            self._manifests.pop(next(iter(self._manifests)))
        needed = set().union(*self._manifests.values())
        pushed_folders.remove_old(self.folder, self.run, needed)


def own_writes(buckets: Sequence[Sequence[Any]], rank: int) -> list[list[TensorSlice]]:
    """Returns, for each of `buckets` (lists of tensors), the slices that process `rank` writes.
    Together, the processes write every element once; the processes that hold a slice share the work
    evenly.
    """
    balance = Balance()
    found = []
    for tensors in buckets:
        own = []
        for tensor in tensors:
            everything = tuple((number, whole(shape)) for number, shape in enumerate(tensor.shapes))
            for source, _, part in balance.transfers(tensor, ((READER, everything),)):
                if source == rank:
                    own.append(part)
        found.append(own)
    return found
