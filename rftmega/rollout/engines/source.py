"""Adapts the policy to vLLM's own weight transports (`vllm.distributed.weight_transfer`: ipc, nccl,
...).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource


class Exported(Protocol):
    """Exported yields whole HF-named tensors one by one, and plans them in advance
    (`weights.Exporter`).
    """

    @property
    def planned(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class PolicySource(WeightSource):
    """PolicySource yields every tensor of the policy. All processes of a replica must iterate in
    step: gathering is a collective.
    """

    def __init__(self, exporter: Exported):
        self._exporter = exporter

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self._exporter.planned
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._exporter)
