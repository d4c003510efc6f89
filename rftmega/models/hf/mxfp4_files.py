"""Reads folders of experts' weights in the format MXFP4, as gpt-oss is published in, and writes them.

A weight [E, C, R] is read in the model's dtype, one expert at a time, so that no more than the
weight itself is in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.converters.mxfp4 import BLOCKS, GROUP, MXFP4, SCALES
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor, fill_from
from rftmega.models.kernels.mxfp4 import dequantised, quantise

STORED = "U8"


class MXFP4Slice:
    """MXFP4Slice reads dequantised slices of a packed weight [E, C, R]."""

    def __init__(self, blocks: Any, scales: Any, shape: tuple[int, ...], dtype: torch.dtype):
        self._blocks, self._scales, self._shape, self._dtype = blocks, scales, shape, dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        given = index if isinstance(index, tuple) else (index,)
        given = (*given, *[slice(None)] * (3 - len(given)))
        (first, end, _), (left, right, _), (low, high, _) = (
            each.indices(size) for each, size in zip(given, self._shape, strict=True)
        )
        groups = slice(left // GROUP, -(-right // GROUP))
        inside = slice(left - groups.start * GROUP, right - groups.start * GROUP)
        found = torch.empty(end - first, right - left, high - low, dtype=self._dtype)
        for expert in range(first, end):
            blocks = self._blocks[expert, low:high, groups]
            scales = self._scales[expert, low:high, groups]
            found[expert - first] = dequantised(blocks, scales)[:, inside].T
        return found


class MXFP4Folder(HFFolder):
    """MXFP4Folder is an HFFolder that presents each pair of blocks and scales as the weight that
    it stands for.
    """

    def __init__(self, folder: str | Path, layout: MXFP4):
        """Opens the folder; `layout` has the dtype of its weights. Raises CheckpointError for
        blocks without scales, scales without blocks, and shapes that don't belong together.
        """
        super().__init__(folder)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        stored = set(super().names)
        self.packed = {  # names of the weights
            name.removesuffix(end)
            for end in (BLOCKS, SCALES)
            for name in stored
            if name.endswith(end)
        }
        for name in sorted(self.packed):
            if missing := [name + end for end in (BLOCKS, SCALES) if name + end not in stored]:
                raise CheckpointError(
                    f"{self.folder} holds no {missing[0]!r}, without which {name} can't be read."
                )
            if name in stored:
                raise CheckpointError(
                    f"{self.folder} holds {name!r}, and once more as {name + BLOCKS!r}. Remove one of them."
                )
            self._check(name)
        self._hidden = {name + end for name in self.packed for end in (BLOCKS, SCALES)}

    def _check(self, name: str) -> None:
        blocks, scales = super().shape_of(name + BLOCKS), super().shape_of(name + SCALES)
        if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3]:
            raise CheckpointError(
                f"{self.folder}: {name + BLOCKS} has shape {blocks} and {name + SCALES} {scales}; they must be [experts, rows, "
                f"groups, {GROUP // 2}] and [experts, rows, groups]."
            )
        for each in (name + BLOCKS, name + SCALES):
            if (said := self._said(each)["dtype"]) != STORED:
                raise CheckpointError(
                    f"{self.folder / self._holder(each)}: {each} is of dtype {said}; it must be {STORED}."
                )

    def __contains__(self, name: str) -> bool:
        return name in self.packed or (name not in self._hidden and super().__contains__(name))

    @property
    def names(self) -> Iterable[str]:
        return [*(name for name in super().names if name not in self._hidden), *sorted(self.packed)]

    def dtype_of(self, name: str, *, integers: bool | None = False) -> torch.dtype:
        if name in self.packed:
            return self._dtype
        return super().dtype_of(name, integers=integers)

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name not in self.packed:
            return super().shape_of(name)
        experts, rows, groups, _ = super().shape_of(name + BLOCKS)
        return (experts, groups * GROUP, rows)

    def slice_of(self, name: str, shape: tuple[int, ...], *, integers: bool | None = False) -> Any:
        if name not in self.packed:
            return super().slice_of(name, shape, integers=integers)
        found = self.shape_of(name)
        if found != tuple(shape):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {found}; config.json asks for {tuple(shape)}."
            )
        blocks, scales = (
            self._file(self._holder(each)).get_slice(each)
            for each in (name + BLOCKS, name + SCALES)
        )
        return MXFP4Slice(blocks, scales, found, self._dtype)

    def fill(self, targets: Sequence[Tensor], name: str, shape: tuple[int, ...]) -> str:
        """Reads tensor `name` into `targets` as HFFolder.fill does, dequantised; the returned
        checksum is of the dequantised weight, not of the bytes in the file.
        """
        if name not in self.packed:
            return super().fill(targets, name, shape)
        return fill_from(self.slice_of(name, shape), targets)

    def entry(self, name: str, shape: tuple[int, ...], number: int) -> Tensor:
        if name not in self.packed:
            return super().entry(name, shape, number)
        found: Tensor = self.slice_of(name, shape)[number : number + 1][0]
        return found


class MXFP4Format:
    """MXFP4Format writes a weight [E, C, R] as blocks and scales: a format of `Quantising`."""

    def planned(self, tensor: PlannedTensor) -> list[PlannedTensor]:
        """Returns the two tensors that `tensor` is written as.

        Raises CheckpointError if its columns are no multiple of the group.
        """
        experts, columns, rows = tensor.shape
        if columns % GROUP:
            raise CheckpointError(
                f"{tensor.name} {tensor.shape} has {columns} columns, no multiple of {GROUP}, so it can't be written as MXFP4."
            )
        scales = (experts, rows, columns // GROUP)
        return [
            PlannedTensor(tensor.name + BLOCKS, torch.uint8, (*scales, GROUP // 2)),
            PlannedTensor(tensor.name + SCALES, torch.uint8, scales),
        ]

    def stored(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields blocks and scales of `weight`. Raises CheckpointError for NaN or infinity in it."""
        if not weight.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity, so it is not written.")
        parts = [quantise(expert.T.contiguous()) for expert in weight.cpu()]
        yield name + BLOCKS, torch.stack([blocks for blocks, _ in parts])
        yield name + SCALES, torch.stack([scales for _, scales in parts])
