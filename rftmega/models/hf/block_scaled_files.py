"""Reads folders of FP8 weights that have one scale per block of a matrix, like DeepSeek-V3's
published weights, and writes them.

A weight is read in the model's dtype: its FP8 numbers in float32 times the scale of their block.
Rows of blocks are dequantised one at a time, so that no more than the weight itself is in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.converters.block_scales import BlockScales
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import SCALES
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor, fill_from
from rftmega.models.kernels.block_scaled import NUMBERS, quantise

STORED = "F8_E4M3"


class ScaledSlice:
    """ScaledSlice reads dequantised slices of one block-scaled weight."""

    def __init__(
        self, stored: Any, scales: Tensor, shape: tuple[int, ...], layout: BlockScales
    ) -> None:
        self._stored, self._scales, self._shape, self._layout = stored, scales, shape, layout

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = rows.indices(self._shape[0])
        left, right, _ = columns.indices(self._shape[1])
        high, wide = self._layout.rows, self._layout.columns
        found = torch.empty(stop - start, right - left, dtype=getattr(torch, self._layout.dtype))
        for first in range(start - start % high, stop, high):
            low, up = max(first, start), min(first + high, stop)
            scales = self._scales[first // high, left // wide : -(-right // wide)]
            begin = left % wide
            scale = scales.repeat_interleave(wide)[begin : begin + right - left]
            numbers = self._stored[low:up, left:right].to(torch.float32)
            found[low - start : up - start] = numbers * scale
        return found


class BlockScaledFolder(HFFolder):
    """BlockScaledFolder is an HFFolder that dequantises block-scaled weights; the tensors of scales
    are not visible.
    """

    def __init__(self, folder: str | Path, layout: BlockScales):
        """Opens the folder; `layout` describes the blocks. Raises CheckpointError for scales
        without a weight.
        """
        super().__init__(folder)
        self._layout = layout
        self._scales = {name for name in super().names if name.endswith(SCALES)}
        for name in sorted(self._scales):
            if not super().__contains__(name.removesuffix(SCALES)):
                raise CheckpointError(
                    f"{self.folder} holds {name!r}, and no weight that it scales."
                )

    def __contains__(self, name: str) -> bool:
        return name not in self._scales and super().__contains__(name)

    @property
    def names(self) -> Iterable[str]:
        return [name for name in super().names if name not in self._scales]

    @property
    def scaled(self) -> set[str]:
        """Returns the names of the weights that are stored in FP8 with scales."""
        return {name.removesuffix(SCALES) for name in self._scales}

    def dtype_of(self, name: str, *, integers: bool | None = False) -> torch.dtype:
        if not self._is_scaled(name):
            return super().dtype_of(name, integers=integers)
        if (said := self._said(name)["dtype"]) != STORED:
            raise CheckpointError(
                f"{self.folder / self._holder(name)}: {name} is of dtype {said} and has scales; {STORED} has them."
            )
        found: torch.dtype = getattr(torch, self._layout.dtype)
        return found

    def slice_of(self, name: str, shape: tuple[int, ...], *, integers: bool | None = False) -> Any:
        if not self._is_scaled(name):
            return super().slice_of(name, shape, integers=integers)
        self.dtype_of(name)
        stored = self._file(self._holder(name)).get_slice(name)
        self._check_shape(name, tuple(stored.get_shape()), shape)
        if len(shape) != 2:
            raise CheckpointError(f"{self.folder}: {name} {shape} has scales, and is no matrix.")
        blocks = (-(-shape[0] // self._layout.rows), -(-shape[1] // self._layout.columns))
        scales = super().whole(name + SCALES, blocks).to(torch.float32)
        return ScaledSlice(stored, scales, tuple(shape), self._layout)

    def fill(self, targets: Sequence[Tensor], name: str, shape: tuple[int, ...]) -> str:
        """Reads tensor `name` into `targets` as HFFolder.fill does, dequantised; the returned
        checksum is of the dequantised weight, not of the bytes in the file.
        """
        if not self._is_scaled(name):
            return super().fill(targets, name, shape)
        return fill_from(self.slice_of(name, shape), targets)

    def _is_scaled(self, name: str) -> bool:
        return name + SCALES in self._scales


class BlockScaledFormat:
    """BlockScaledFormat writes a weight as FP8 numbers and scales: a format of `Quantising`."""

    def __init__(self, layout: BlockScales):
        self._layout = layout

    def planned(self, tensor: PlannedTensor) -> list[PlannedTensor]:
        """Returns the two tensors that `tensor` is written as."""
        rows, columns = tensor.shape
        blocks = (-(-rows // self._layout.rows), -(-columns // self._layout.columns))
        return [
            PlannedTensor(tensor.name, NUMBERS, tensor.shape),
            PlannedTensor(tensor.name + SCALES, torch.float32, blocks),
        ]

    def stored(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields numbers and scales of `weight`. Raises CheckpointError for NaN or infinity in it."""
        numbers, scales = quantise(weight, self._layout.rows, self._layout.columns)
        if not scales.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity, so it is not written.")
        yield name, numbers
        yield name + SCALES, scales
