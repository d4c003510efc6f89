"""Megatron's distributed checkpoint (torch.distributed.checkpoint files), written and read one tensor at a time.

`megatron.core.dist_checkpointing` writes a whole state dict that is in memory; this writes the same files as a stream.
"""

import io
import json
import os
import pickle
from collections.abc import Iterable
from dataclasses import asdict
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

from converters.hf_folder import bytes_of, checksum
from rftmega.megatron.stored import FORMAT, MANIFEST, MARK, Stored


def write_pieces(path: Path, pieces: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> list[Stored]:
    """Writes (key, offset, box) one after the other; the file gets its name when it is complete and on the disk."""
    draft, stored = path.with_name(path.name + ".part"), []
    with draft.open("wb") as stream:
        for key, offset, box in pieces:
            box = box.contiguous()
            if box.untyped_storage().nbytes() != box.nbytes:
                box = torch.frombuffer(bytes_of(box), dtype=box.dtype).view(box.shape)  # torch.save writes all behind a view
            begin = stream.tell()
            _save(box, stream)
            length = stream.tell() - begin
            dtype = str(box.dtype).removeprefix("torch.")
            stored.append(Stored(key, offset, tuple(box.shape), dtype, path.name, begin, length, checksum(box)))
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(path)
    return stored


def _save(box: Tensor, stream: Any) -> None:
    """As torch.save, without its CRC, which halves its speed: there is a checksum in the manifest."""
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(box, stream)
    finally:
        torch.serialization.set_crc32_options(computed)


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
