"""Megatron's distributed checkpoint (torch.distributed.checkpoint files), written and read one tensor at a time.

`megatron.core.dist_checkpointing` writes a whole state dict that is in memory; this writes the same files as a stream.
"""

import io
import json
import os
import pickle
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from converters.hf_folder import checksum
from rftmega.errors import CheckpointError
from rftmega.megatron.sharded import FORMAT, MANIFEST, MARK, read_manifest


@dataclass(frozen=True)
class Stored:
    """A box of a tensor in a file."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: str
    begin: int  # bytes
    length: int
    checksum: str


def write_pieces(path: Path, pieces: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> list[Stored]:
    """Writes (key, offset, box) one after the other; the file gets its name when it is complete and on the disk."""
    draft, stored = path.with_name(path.name + ".part"), []
    with draft.open("wb") as stream:
        for key, offset, box in pieces:
            box = box.contiguous()
            if box.untyped_storage().nbytes() != box.nbytes:
                box = box.clone()  # torch.save writes the whole storage behind a view
            begin = stream.tell()
            torch.save(box, stream)
            length = stream.tell() - begin
            dtype = str(box.dtype).removeprefix("torch.")
            stored.append(Stored(key, offset, tuple(box.shape), dtype, path.name, begin, length, checksum(box)))
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(path)
    return stored


def finish(folder: Path, stored: list[Stored], shapes: dict[str, tuple[int, ...]], objects: list[str], manifest: Any) -> None:
    """Writes what makes the files a checkpoint: torch's metadata, Megatron's mark, and last of all the manifest."""
    empty = io.BytesIO()
    torch.save([None], empty)
    names = sorted(objects)
    (folder / "__objects.distcp").write_bytes(empty.getvalue() * len(names))
    size = len(empty.getvalue())
    described: dict[str, Any] = {name: BytesStorageMetadata() for name in names}
    where: dict[MetadataIndex, _StorageInfo] = {
        MetadataIndex(name): _StorageInfo("__objects.distcp", number * size, size) for number, name in enumerate(names)
    }
    for box in stored:
        tensor = described.setdefault(
            box.key,
            TensorStorageMetadata(TensorProperties(dtype=getattr(torch, box.dtype)), torch.Size(shapes[box.key]), []),
        )
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        where[MetadataIndex(box.key, torch.Size(box.offset))] = _StorageInfo(box.file, box.begin, box.length)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=where)))
    torch.save({}, folder / "common.pt")
    (folder / MARK).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    write_manifest(folder, manifest | {"pieces": [asdict(box) for box in stored], "shapes": shapes})


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    draft = folder / (MANIFEST + ".part")
    with draft.open("w") as stream:
        json.dump({"format": FORMAT, **manifest}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(folder / MANIFEST)


class Reader:
    """The tensors of a whole checkpoint, by boxes; every piece that is read is checked."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.stored: dict[str, list[Stored]] = {}
        for said in self.manifest["pieces"]:
            box = Stored(**{**said, "offset": tuple(said["offset"]), "shape": tuple(said["shape"])})
            self.stored.setdefault(box.key, []).append(box)

    def dtype_of(self, key: str) -> torch.dtype:
        """Raises CheckpointError where there is no such tensor."""
        if key not in self.stored:
            raise CheckpointError(f"{self.folder} holds no tensor {key!r}.")
        return getattr(torch, self.stored[key][0].dtype)

    def fill(self, target: Tensor, key: str, offset: tuple[int, ...]) -> None:
        """Copies the box at `offset` of tensor `key` into `target`.

        Raises CheckpointError where the checkpoint does not hold all of it, or a piece's checksum is another.
        """
        self.dtype_of(key)
        missing = target.numel()
        for box in self.stored[key]:
            low = [max(a, b) for a, b in zip(offset, box.offset, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, target.shape, box.offset, box.shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            held = self._read(box)[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.offset, strict=True))]
            target[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))] = held
            missing -= held.numel()
        if missing:
            raise CheckpointError(f"{self.folder}: {missing} elements of {key!r} are missing.")

    def _read(self, box: Stored) -> Tensor:
        path = self.folder / box.file
        try:
            with path.open("rb") as stream:
                part: Any = _Part(stream, box.begin, box.length)
                tensor = torch.load(part, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path}: {box.key} at {box.offset} can't be read: {error}") from error
        if (found := checksum(tensor)) != box.checksum:
            raise CheckpointError(f"{path}: {box.key} at {box.offset} has checksum {found}, the manifest says {box.checksum}.")
        return tensor


class _Part(io.RawIOBase):
    """Bytes begin to begin + length of a file, as a file."""

    def __init__(self, stream: Any, begin: int, length: int):
        self.stream, self.begin, self.length, self.at = stream, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = (0, self.at, self.length)[whence] + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.stream.seek(self.begin + self.at)
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        count: int = self.stream.readinto(view)
        self.at += count
        return count
