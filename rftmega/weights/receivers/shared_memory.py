"""Receives a push through shared memory inside a vLLM server's worker: whole tensors that the
trainer's processes wrote.

The model's loader copies its slices directly from the shared memory. A missing or damaged tensor is
an error.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rftmega.core.errors import EngineError
from rftmega.runtime.parallel import shared
from rftmega.runtime.parallel.checksum import blocks, checksum
from rftmega.weights.receivers.checkpoint_transfer import CheckpointTransferEngine


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """SharedMemoryInit lists the tensors that each push contains. `names`: the HF names of all
    tensors.
    """

    names: list[str]


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """SharedMemoryUpdate describes a bucket of the push `version`: a shared memory segment and the
    tensors in it.

    `memory`: name of the shared memory, of `size` bytes. `last`: whether this is the push's last
    bucket. A tensor is [name, dtype, shape, first byte, checksum].
    """

    version: int
    last: bool
    memory: str
    size: int
    tensors: list[list[Any]]


class SharedMemoryWeightTransferEngine(
    CheckpointTransferEngine[SharedMemoryInit, SharedMemoryUpdate]
):
    """SharedMemoryWeightTransferEngine loads buckets of tensors from this host's shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        self.expect(init_info.names)
        self._mapped: dict[str, Tensor] = {}

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        memory = self._map(update_info.memory, update_info.size)
        named = []
        for name, dtype_name, shape, start, written in update_info.tensors:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            if not 0 <= start <= start + blocks(size) <= len(memory):
                raise EngineError(f"{name} of push {update_info.version} lies outside the memory.")
            if int(checksum(memory[start : start + blocks(size)])) != written:
                raise EngineError(f"{name} of push {update_info.version} is not as it was written.")
            named.append((name, memory[start : start + size].view(dtype).view(shape)))
        self.load(named)
        self._keep_what_waits(memory)
        if update_info.last:
            self.refuse_gaps()

    def shutdown(self) -> None:
        self._mapped.clear()

    def _map(self, name: str, size: int) -> Tensor:
        """Maps the shared memory `name`, once, and returns its bytes as a tensor. Raises
        EngineError if the name is not of memory that the trainer created.
        """
        if name not in self._mapped:
            try:
                memory = shared.attach(name, size)
            except ValueError as error:
                raise EngineError(f"A push names memory that it may not: {error}.") from error
            self._mapped[name] = torch.frombuffer(memory, dtype=torch.uint8)
        return self._mapped[name]

    def _keep_what_waits(self, memory: Tensor) -> None:
        """Clones the tensors that vLLM keeps until their layer is complete: they are views of
        `memory`, which a later bucket overwrites.
        """
        for module in self.model.modules():
            for _, loaded in get_layerwise_info(module).loaded_weights:
                for name, value in loaded.arguments.items():
                    if (
                        isinstance(value, Tensor)
                        and value.untyped_storage().data_ptr()
                        == memory.untyped_storage().data_ptr()
                    ):
                        loaded.arguments[name] = value.clone()
