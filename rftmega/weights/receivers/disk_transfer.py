"""Receives a push from disk inside a vLLM server's worker: reads the folder that the trainer's
processes wrote (`transports.disk_weights`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rftmega.core.errors import EngineError
from rftmega.core.shards import Box
from rftmega.runtime.parallel.checksum import checksums
from rftmega.weights.lazy_tensors import LazyTensor, reader
from rftmega.weights.receivers.checkpoint_transfer import CheckpointTransferEngine
from rftmega.weights.transports.disk_weights import MANIFEST


@dataclass
class DiskInit(WeightTransferInitInfo):
    """DiskInit lists the tensors that each push contains. `buckets`: [name, dtype, shape] of each
    tensor, in groups that are loaded together.
    """

    buckets: list[list[Any]]


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """DiskUpdate names the push to load: its version and the folder with its manifest."""

    version: int
    folder: str


class DiskWeightTransferEngine(CheckpointTransferEngine[DiskInit, DiskUpdate]):
    """DiskWeightTransferEngine loads weights from the folder of a push: it reads only the slices
    that the model's loader asks for, and verifies the checksum of each slice.
    """

    init_info_cls = DiskInit
    update_info_cls = DiskUpdate

    def init_transfer_engine(self, init_info: DiskInit) -> None:
        self._buckets = init_info.buckets
        self.expect(name for bucket in init_info.buckets for name, _, _ in bucket)

    def receive_weights(self, update_info: DiskUpdate) -> None:
        folder = Path(update_info.folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise EngineError(f"{folder / MANIFEST} can't be read: {error}") from error
        if manifest["version"] != update_info.version:
            raise EngineError(
                f"{folder / MANIFEST} is of push {manifest['version']}, not {update_info.version}."
            )
        for bucket in self._buckets:
            named = []
            for name, dtype_name, shape in bucket:
                slices = manifest["tensors"].get(name, [])
                pieces = [_piece(folder.parent, *each) for each in slices]
                fetch = reader(name, pieces)
                dtype = getattr(torch, dtype_name)
                named.append((name, LazyTensor.of(tuple(shape), dtype, fetch, self.device)))
            self.load(named)
        self.refuse_gaps()

    def shutdown(self) -> None: ...


def _piece(
    folder: Path, file: str, key: str, box: list[list[int]], written: int
) -> tuple[Box, Tensor]:
    """Returns the block (box) of a slice and its elements, read from the safetensors file `file` in
    `folder` under the name `key`. `written`: the slice's checksum in the manifest. Raises
    EngineError if the slice can't be read or has another checksum.
    """
    path = folder / file
    try:
        with safe_open(path, framework="pt") as opened:
            elements = opened.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{key} can't be read from {path}: {error}") from error
    if int(checksums(elements[None])) != written:
        raise EngineError(f"{key} in {path} is not as it was written.")
    return tuple((start, stop) for start, stop in box), elements
