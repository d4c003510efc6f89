"""Writes Megatron's distributed checkpoints (torch.distributed.checkpoint files) one tensor at a
time.

`megatron.core.dist_checkpointing` needs the whole state dict in memory; this module writes the same
files as a stream.
"""

import functools
import hashlib
import io
import json
import math
import pickle
import tempfile
from collections.abc import Iterable
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

from rftmega.checkpoints.o_direct import DirectFile
from rftmega.checkpoints.reader import FORMAT, MANIFEST, MARK, Stored, seal
from rftmega.models.hf.hf_folder import checksum, draft_of, land, write_all, write_bytes

OBJECTS = "__objects.distcp"
Boxed = tuple[str, tuple[int, ...], Tensor]  # key, offset, box


def write_pieces(path: Path, pieces: Iterable[Boxed], *, size: int | None = None) -> list[Stored]:
    """Writes blocks (boxes) of tensors, given as (key, offset in the tensor, elements), one after
    the other into the file `path`. The file gets its name when it is complete and synced. Returns
    the location and checksum of each block.

    If `size`, the bytes of the whole file, is given, the writes bypass the page cache.
    """
    stored = []
    draft = draft_of(path)
    stream: Any
    with draft.open("wb", buffering=0) if size is None else DirectFile(draft, size) as stream:
        for key, offset, box in pieces:
            box = box.contiguous()
            before, after = around(tuple(box.shape), box.dtype)
            begin = stream.tell()
            write_bytes(stream, before)
            write_all(stream, box)
            write_bytes(stream, after)
            length = len(before) + box.nbytes + len(after)
            dtype = str(box.dtype).removeprefix("torch.")
            stored.append(
                Stored(
                    key, offset, tuple(box.shape), dtype, path.name, begin, length, checksum(box)
                )
            )
    land(path)
    return stored


def file_bytes(pieces: Iterable[Boxed]) -> int:
    """Returns the size in bytes of the file that `write_pieces` would write for these blocks."""
    return sum(
        box.nbytes + sum(map(len, around(tuple(box.shape), box.dtype))) for _, _, box in pieces
    )


@functools.cache
def around(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Returns the bytes that torch.save writes before and after the data of a contiguous tensor, so
    that the data itself can be written directly: torch.save takes five times as long as a plain
    write.

    The CRC in the returned bytes is invalid; torch ignores it when reading, and the manifest has
    our checksum.
    """
    with tempfile.TemporaryDirectory() as folder, torch.serialization.skip_data():
        path = Path(folder) / "archive"
        # a sparse file: neither memory nor disk is touched
        torch.save(torch.empty(shape, dtype=dtype), path)
        archive: Any = torch._C.PyTorchFileReader(str(path))
        begin = archive.get_record_offset("data/0")
        with path.open("rb") as stream:
            before = stream.read(begin)
            stream.seek(begin + math.prod(shape) * dtype.itemsize)
            return before, stream.read()


def finish(
    folder: Path,
    stored: list[Stored],
    shapes: dict[str, tuple[int, ...]],
    objects: list[str],
    manifest: Any,
) -> None:
    """Completes a checkpoint: writes torch's metadata, Megatron's marker file and, last, the
    manifest.

    `stored`: all blocks in the checkpoint's files; `shapes`: shape of each whole tensor by key;
    `objects`: keys of non-tensor entries, which are stored as empty; `manifest`: further content of
    the manifest.
    """
    empty = _saved([None])
    names = sorted(objects)
    described: dict[str, Any] = {name: BytesStorageMetadata() for name in names}
    where: dict[MetadataIndex, _StorageInfo] = {
        MetadataIndex(name): _StorageInfo(OBJECTS, number * len(empty), len(empty))
        for number, name in enumerate(names)
    }
    for box in stored:
        tensor = described.setdefault(
            box.key,
            TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, box.dtype)), torch.Size(shapes[box.key]), []
            ),
        )
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
        where[MetadataIndex(box.key, torch.Size(box.offset))] = _StorageInfo(
            box.file, box.begin, box.length
        )
    files = {
        OBJECTS: empty * len(names),
        ".metadata": pickle.dumps(Metadata(described, storage_data=where)),
        "common.pt": _saved({}),
        MARK: json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode(),
    }
    for name, content in files.items():
        _write(folder / name, content)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    write_manifest(
        folder,
        manifest | {"files": sums, "pieces": [box.as_json() for box in stored], "shapes": shapes},
    )


def _saved(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    said = {"format": FORMAT, **manifest}
    write_json(folder / MANIFEST, said | {"seal": seal(said)})


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file under a temporary name, and renames it when it is complete and synced."""
    _write(path, json.dumps(content, indent=1).encode())


def _write(path: Path, content: bytes) -> None:
    draft_of(path).write_bytes(content)
    land(path)
