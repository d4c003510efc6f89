"""Keeps frozen weights on the host in int8 while they are offloaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rftmega.models.kernels.block_scaled import dequantised, quantise
from rftmega.runtime import device


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """PackedWeight is a weight [R, C] and its int8 numbers, with one scale per `wide` columns of a
    row.
    """

    weight: Tensor  # [R, C], on the device or offloaded
    wide: int
    numbers: Tensor  # int8, on the host
    scales: Tensor  # float32, on the host

    @torch.no_grad()
    def unpack(self) -> None:
        """Writes the dequantised values into the weight, which must be on the device."""
        self.weight.copy_(self._on(self.weight.device))

    def unpacked(self) -> Tensor:
        """Returns the dequantised weight on the host."""
        return self._on(torch.device("cpu")).to(self.weight.dtype)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def _on(self, where: torch.device) -> Tensor:
        numbers = self.numbers.to(where, non_blocking=True)
        scales = self.scales.to(where, non_blocking=True)
        return dequantised(numbers, scales, 1, self.wide)


@torch.no_grad()
def pack(weights: Sequence[Tensor], *, wide: int) -> tuple[list[PackedWeight], float]:
    """Quantises matrices to int8 in blocks of `wide` columns, and sets each matrix to its
    dequantised values, so that offloading does not change it.
    Returns the packed weights and the relative quantisation error: the root mean square of the
    error divided by that of the weights.
    """
    blocks = [-(-weight.shape[1] // wide) for weight in weights]
    # one buffer of each kind: pinning one costs a call of the driver
    numbers = device.current().host_buffer(sum(each.numel() for each in weights), torch.int8)
    together = sum(len(weight) * across for weight, across in zip(weights, blocks, strict=True))
    scales = device.current().host_buffer(together, torch.float32)
    packed, wrong, whole = [], 0.0, 0.0
    for weight, across in zip(weights, blocks, strict=True):
        taken, numbers = numbers[: weight.numel()], numbers[weight.numel() :]
        scaling, scales = scales[: len(weight) * across], scales[len(weight) * across :]
        numbered, scaled = taken.view(weight.shape), scaling.view(len(weight), across)
        each = PackedWeight(weight, wide, numbered, scaled)
        before = weight.to(torch.float32, copy=True)
        found_numbers, found_scales = quantise(weight, 1, wide, torch.int8)
        each.numbers.copy_(found_numbers)
        each.scales.copy_(found_scales)
        each.unpack()
        wrong += float((weight.float() - before).square().sum(dtype=torch.float64))
        whole += float(before.square().sum(dtype=torch.float64))
        packed.append(each)
    return packed, math.sqrt(wrong / whole) if whole else 0.0
