"""CheckpointWeights brings weights to vLLM servers that have nothing of this package: a Hugging Face
folder a push, which they load again as they loaded their first.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rftmega.errors import CheckpointError, EngineFault
from rftmega.parallel.collectives import gather_objects
from rftmega.shards import Shard
from rftmega.transport.disk_weights import KEPT, READER, own_writes
from rftmega.transport.remote_weights import Asked, RemoteReceivers, RemoteWeights, WaitingEngine
from rftmega.types import SliceChecksums
from rftmega.weights import Exporter, export_hf_folder
from rftmega.weights.slice_sums import sum_of


class CheckpointWeights(RemoteWeights):
    """CheckpointWeights writes a folder a push, whole, through the first process."""

    def __init__(
        self,
        shards: Sequence[Shard],
        engines: RemoteReceivers,
        *,
        bucket_bytes: int,
        model: str | Path,
        folder: str | Path,
    ):
        """`model`: the Hugging Face folder of the base. `folder`: seen under the same path by the
        first process and every engine.
        """
        super().__init__(shards, engines, bucket_bytes=bucket_bytes)
        self.model, self.folder = Path(model), Path(folder).absolute()
        self._exporter = Exporter(shards, None, bucket_bytes=bucket_bytes)
        self._own = [each for bucket in own_writes(self.buckets, self.rank) for each in bucket]
        self._sums = dict[str, int]()  # of this process's slices in the last push

    def checksums(self) -> list[SliceChecksums]:
        """Returns the checksums of every slice of the last push; a collective, with the policy's
        weights on the device. What engines read is checked by nobody: safetensors have no checksums.
        """
        self.shards.look_again()
        found = []
        for each in self._own:
            held, sent = sum_of(self.shards.slice_of(each)), self._sums.get(str(each))
            found.append(SliceChecksums(each.name, each.box, self.rank, READER, held, sent, sent))
        return [each for theirs in gather_objects(found) for each in theirs]

    def _linked(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        return [each.name for each in waiting]

    def _brought(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        target = self.folder / f"version-{version}"
        try:
            export_hf_folder(self._exporter, self.model, target, write=self.rank == 0)
        except CheckpointError as error:
            raise EngineFault(f"{error} Push {version} did not happen.") from error
        self._sums = {str(each): sum_of(self.shards.slice_of(each)) for each in self._own}
        if self.rank == 0:
            self._remove_old(version)
        return self._exporter.total_bytes, self._asked(
            names, self.engines.receive, {"weights_path": str(target)}
        )

    def _least_bytes(self, landed: Sequence[str]) -> int:
        return self._exporter.total_bytes

    def _forget(self, names: set[str]) -> None:
        """A server needs no preparation."""

    def _remove_old(self, version: int) -> None:
        """Removes what no server reads any more."""
        kept = {f"version-{version - before}" for before in range(KEPT)}
        for old in self.folder.glob("version-*"):
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)
