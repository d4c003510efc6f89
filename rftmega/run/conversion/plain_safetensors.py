"""Writes the weights of a folder as plain safetensors. Quantised weights are written in the model's
dtype, weights of PyTorch's own files (*.bin) in theirs. Folders are read one tensor at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rftmega.checkpoints.reader import PROGRESS
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.models.hf.checksums import files_of, sum_of, write_sums
from rftmega.models.hf.hf_folder import (
    PlannedTensor,
    copy_companions,
    shards_of,
    write_index,
    write_shard,
)
from rftmega.models.hf.pickled_files import PickledFolder
from rftmega.models.hf.quantised_folder import is_quantised, open_quantised
from rftmega.run.conversion.target_folder import (
    FILE_BYTES,
    Progress,
    begin,
    fingerprint,
    note,
    written_alone,
)

Entries = dict[str, dict[str, Any]]  # file -> its entry in the log
# (path, planned tensors) -> entry of the file, with its checksum as "sum"
WriteFile = Callable[[Path, Sequence[PlannedTensor]], dict[str, Any]]


class Tensors(Protocol):
    """Tensors is the interface to the weights of a folder."""

    @property
    def names(self) -> Any: ...

    @property
    def files(self) -> list[Path]: ...

    def dtype_of(self, name: str, *, integers: bool | None = False) -> torch.dtype: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def whole(
        self, name: str, shape: tuple[int, ...], *, integers: bool | None = False
    ) -> Tensor: ...


def open_weights(source: Path) -> Tensors:
    """Opens the weights that `to_plain` can read. Raises CheckpointError if there is nothing to
    convert, or nothing that can be read.
    """
    config = read_json_object(source / "config.json")
    if not list(source.glob("*.safetensors")):
        return PickledFolder(source)
    if not is_quantised(config):
        raise CheckpointError(
            f"{source} holds plain safetensors weights already. There is nothing to convert."
        )
    return open_quantised(source, config)


def bytes_of_weights(source: Path) -> int:
    """Returns the number of bytes of weights that `to_plain` writes. Raises CheckpointError as
    `open_weights` does.
    """
    return sum(tensor.bytes for tensor in _planned(open_weights(source)))


def to_plain(source: Path, target: Path, *, progress: Progress = lambda _: None) -> str | None:
    """Writes to `target` the model of `source` with plain weights. Resumes an interrupted
    conversion.

    `progress`: called with the number of bytes finished since the last call. Returns a text about
    the changes made to config.json, or None if there are none. Raises CheckpointError as
    `open_weights` does.
    """
    files = open_weights(source)

    def write(path: Path, wanted: Sequence[PlannedTensor]) -> dict[str, Any]:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, _, shape in wanted:
                yield name, files.whole(name, shape, integers=None)

        return {"file": path.name, "sum": f"xxh3:{write_shard(path, wanted, tensors()).file}"}

    _, changed = write_folder(
        source, target, files, {"source": fingerprint(files)}, write, progress
    )
    return changed


def write_folder(
    source: Path,
    target: Path,
    files: Tensors,
    job: Mapping[str, Any],
    write: WriteFile,
    progress: Progress,
) -> tuple[Entries, str | None]:
    """Writes to `target` a folder with the tensors of `files`, each in its dtype and shape, and the
    other files of the folder `source`; `write` writes a file of tensors. Resumes an interrupted
    conversion with the same `job`.

    Returns the log's entries by file, and a text about the changes made to config.json, or None.
    """
    shards = shards_of(_planned(files), FILE_BYTES)
    with written_alone(target):
        finished = begin(target, dict(job))
        done: Entries = {}
        for file, wanted in shards.items():
            if file not in finished:
                finished[file] = write(target / file, wanted)
                note(target, finished[file])
            done[file] = finished[file]
            progress(sum(tensor.bytes for tensor in wanted))
        changed = copy_companions(source, target, shards)
        write_index(target, shards)
        of_files = {file: said["sum"] for file, said in done.items()}
        for path in files_of(target):
            if path.name not in done:
                of_files[path.name] = sum_of(path, "xxh3")
        write_sums(target, of_files)
        (target / PROGRESS).unlink()
    return done, changed


def _planned(files: Tensors) -> list[PlannedTensor]:
    return [
        PlannedTensor(name, files.dtype_of(name, integers=None), files.shape_of(name))
        for name in files.names
    ]
