"""Weight sync to unmodified inference servers: each push writes a Hugging Face folder, which the
servers reload in the way they loaded their first model.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rftmega.core.errors import CheckpointError, EngineFault
from rftmega.core.shards import Shard
from rftmega.weights import export_hf_folder
from rftmega.weights.transports import pushed_folders
from rftmega.weights.transports.disk_weights import KEPT
from rftmega.weights.transports.remote_weights import Asked, RemoteReceivers, WaitingEngine
from rftmega.weights.transports.whole_weights import WholeWeights


class CheckpointWeights(WholeWeights):
    """CheckpointWeights writes one complete Hugging Face folder per push, through the first
    process.
    """

    run = ""

    def __init__(
        self,
        shards: Sequence[Shard],
        engines: RemoteReceivers,
        *,
        bucket_bytes: int,
        model: str | Path,
        folder: str | Path,
        run: str = "",
    ):
        """`model`: the Hugging Face folder of the base model. `folder`: parent of the push folders,
        visible under the same path to the first process and every engine. `run`: name of the run
        that pushes.
        """
        super().__init__(shards, engines, bucket_bytes=bucket_bytes)
        self.run = run
        self.model, self.folder = Path(model), Path(folder).absolute()

    def _linked(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        return [each.name for each in waiting]

    def _keep(self, names: set[str]) -> None:
        """Does nothing: these servers need no preparation before a push, so nothing is stored for
        them.
        """

    def _gave(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        target = self.folder / pushed_folders.folder_name(version, self.run)
        try:
            export_hf_folder(self._exporter, self.model, target, write=self.rank == 0)
        except CheckpointError as error:
            raise EngineFault(f"{error} Push {version} did not happen.") from error
        if self.rank == 0:
            self._remove_old(version, target)
        told = {"weights_path": str(target), "version": version}
        return self._exporter.total_bytes, self._asked(names, self.engines.receive, told)

    def _least_bytes(self, landed: Sequence[str]) -> int:
        return self._exporter.total_bytes

    def _forget(self, names: set[str]) -> None:
        """Does nothing: these servers need no preparation before a push, so nothing is stored for
        them.
        """

    def _remove_old(self, version: int, target: Path | None = None) -> None:
        """Marks the push folder `target` as this run's, and removes the run's folders of older
        versions that no server reads any more.
        """
        if target is not None:
            with suppress(OSError):  # then it is just never removed
                pushed_folders.mark(target, self.run)
        names = [pushed_folders.folder_name(version - before, self.run) for before in range(KEPT)]
        pushed_folders.remove_old(self.folder, self.run, names)
