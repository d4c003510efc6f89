"""Gives the policy as vLLM's own weight transports take it (`vllm.distributed.weight_transfer`:
ipc, nccl, ...).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource


class Exported(Protocol):
    """Whole tensors under HF names, one by one, and what they will be (`weights.Exporter`)."""

    @property
    def planned(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class PolicySource(WeightSource):
    """Every process of a replica gives every tensor, and all of them iterate in step: gathering is
    a collective.
    """

    def __init__(self, exporter: Exported):
        self._exporter = exporter

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self._exporter.planned
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._exporter)
