"""Receives a push, inside a vLLM server's worker: whole tensors in memory that the trainer's
processes wrote.

A loader copies its slices straight from there. What is missing at the end, or is not what was
written, is an error, and the trainer's side then takes the server for one without weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rftmega.errors import EngineError
from rftmega.parallel import shared
from rftmega.parallel.checksum import blocks, checksum
from rftmega.rollout.reload import forget_expert_kernels, pack_output_heads


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`names`: of all tensors that a push brings."""

    names: list[str]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A bucket: what is where in which memory.

    A tensor is [name, dtype, shape, first byte, checksum].
    """

    version: int
    last: bool
    memory: str
    size: int
    tensors: list[list[Any]]


class SharedMemoryWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes buckets between `start_weight_update` and `finish_weight_update`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._expected = set(init_info.names)
        self._mapped: dict[str, Tensor] = {}
        self._missing: set[str] = set()

    def start_weight_update(self) -> None:
        # an update that broke off left layers half-loaded
        finalize_layerwise_reload(self.model, self.model_config)
        forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self._missing = set(self._expected)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        memory = self._map(update_info.memory, update_info.size)
        named = []
        for name, dtype_name, shape, start, written in update_info.tensors:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            if not 0 <= start <= start + blocks(size) <= len(memory):
                raise EngineError(f"{name} of push {update_info.version} lies outside the memory.")
            if int(checksum(memory[start : start + blocks(size)])) != written:
                raise EngineError(f"{name} of push {update_info.version} is not as it was written.")
            self._missing.discard(name)
            named.append((name, memory[start : start + size].view(dtype).view(shape)))
        model: Any = self.model
        model.load_weights(named)
        self._keep_what_waits(memory)
        if update_info.last:  # here, since vLLM can't start another update once its end has failed
            self._refuse_gaps()

    def _refuse_gaps(self) -> None:
        if self._missing:
            raise EngineError(
                f"The push ended without {sorted(self._missing)[0]} and {len(self._missing) - 1} other tensor(s)."
            )
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            waits = (
                info.can_load()
                and not info.load_numel
                and any(True for _ in module.parameters(recurse=False))
            )
            if waits and not (tied and isinstance(module, ParallelLMHead)):
                raise EngineError(
                    f"{name} took nothing of the push; it would keep its old weights."
                )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_output_heads(self.model)

    def shutdown(self) -> None:
        self._mapped.clear()

    def _map(self, name: str, size: int) -> Tensor:
        """Raises EngineError where it is not memory of the trainer's, which is opened as it is."""
        if name not in self._mapped:
            try:
                memory = shared.attach(name, size)
            except ValueError as error:
                raise EngineError(f"A push names memory that it may not: {error}.") from error
            self._mapped[name] = torch.frombuffer(memory, dtype=torch.uint8)
        return self._mapped[name]

    def _keep_what_waits(self, memory: Tensor) -> None:
        """Clones what waits: a layer that has not got all of its tensors yet holds views of memory
        that the next bucket but one overwrites.
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
