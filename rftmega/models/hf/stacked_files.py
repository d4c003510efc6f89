"""Reads and writes expert matrices of folders that stack the matrices of all experts of a layer in
one tensor.
Both the published layout and the layout of transformers 5 are read. The published one is written,
since every release of transformers, and vLLM, reads it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.converters import stacks_of
from rftmega.converters.block_scales import block_scales
from rftmega.converters.mxfp4 import mxfp4
from rftmega.converters.stacks import Place, Stack
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor, checksum
from rftmega.models.hf.quantised_folder import open_quantised


def open_folder(folder: str | Path, hf_config: Mapping[str, Any]) -> HFFolder:
    """Opens the weights of a folder with the readers that its config requires: quantised or plain,
    stacked or not.
    Raises CheckpointError as the readers do, and for stacked weights that are quantised in blocks.
    """
    stacks = stacks_of(hf_config)
    if stacks and mxfp4(hf_config) is None and block_scales(hf_config):
        raise CheckpointError(
            f"{folder}: quantised weights of a family whose folders hold a layer's experts in one tensor are not read. Convert "
            f"the folder first: rftmega convert to-plain {folder} OUT"
        )
    opened = open_quantised(folder, hf_config)
    return UnstackedFolder(opened, stacks) if stacks else opened


class MatrixSlice:
    """MatrixSlice reads slices of one expert's matrix, or bias, within a stacked tensor."""

    def __init__(self, stored: Any, place: Place):
        self._stored, self._place = stored, place

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        columns = others[0] if others else slice(None)
        start, stop, _ = rows.indices(self._place.stack.shape[0])
        here = self._place.along_out(start, stop)
        own, block = slice(self._place.expert, self._place.expert + 1), slice(here.start, here.stop)
        if len(self._place.stack.shape) == 1:
            found: Tensor = self._stored[own, block][0]
        elif self._place.transposed:
            found = self._stored[own, columns, block][0].T
        else:
            found = self._stored[own, block, columns][0]
        return found[:: here.step] if here.step else found


class UnstackedFolder(HFFolder):
    """UnstackedFolder presents each matrix and bias of another HFFolder's stacked tensors as a
    separate tensor.
    """

    def __init__(self, stored: HFFolder, stacks: Sequence[Stack]):
        """`stored`: the folder; `stacks` describes the stacked tensors that it may contain.

        Raises CheckpointError if a stacked tensor has an unexpected shape, or if a matrix is also
        stored as a separate tensor.
        """
        # everything is read through `stored`, so that the base class has nothing to open
        self.folder, self._stored = stored.folder, stored
        self._places: dict[str, Place] = {}
        for stack in stacks:
            if stack.name in stored:
                self._places |= stack.places(transposed=self._is_transposed(stack))
        self._stacked = {place.stack.name for place in self._places.values()}
        if twice := sorted(self._places.keys() & set(stored.names)):
            stack = self._places[twice[0]].stack
            raise CheckpointError(
                f"{self.folder} holds {twice[0]!r}, and once more in {stack.name!r}. Remove one of them."
            )

    def _is_transposed(self, stack: Stack) -> bool:
        shape = self._stored.shape_of(stack.name)
        if shape not in (stack.published, stack.untransposed):
            other = (
                ""
                if stack.always_transposed
                else f", or as transformers 5 writes it {stack.untransposed}"
            )
            raise CheckpointError(
                f"{self.folder}: {stack.name} has shape {shape}; config.json asks for {stack.published}{other}."
            )
        return shape == stack.published

    def __contains__(self, name: str) -> bool:
        return name in self._places or (name in self._stored and name not in self._stacked)

    @property
    def names(self) -> Iterable[str]:
        return [*(each for each in self._stored.names if each not in self._stacked), *self._places]

    @property
    def files(self) -> list[Path]:
        return self._stored.files

    def slice_of(self, name: str, shape: tuple[int, ...], *, integers: bool | None = False) -> Any:
        if (place := self._places.get(name)) is None:
            return self._stored.slice_of(name, shape, integers=integers)
        _check(place, name, shape)
        return MatrixSlice(self._stored.slice_of(place.stack.name, self._shape_of(place)), place)

    def fill(self, targets: Sequence[Tensor], name: str, shape: tuple[int, ...]) -> str:
        if (place := self._places.get(name)) is None:
            return self._stored.fill(targets, name, shape)
        _check(place, name, shape)
        experts = self._stored.entry(place.stack.name, self._shape_of(place), place.expert)
        matrix = place.of(experts).contiguous()
        for target, rows in zip(
            targets, matrix.split([len(each) for each in targets]), strict=True
        ):
            target.copy_(rows)
        return checksum(matrix)

    def dtype_of(self, name: str, *, integers: bool | None = False) -> torch.dtype:
        place = self._places.get(name)
        return self._stored.dtype_of(place.stack.name if place else name, integers=integers)

    def shape_of(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        return place.stack.shape if place else self._stored.shape_of(name)

    @staticmethod
    def _shape_of(place: Place) -> tuple[int, ...]:
        """Returns the shape of the stacked tensor that has `place`."""
        biases = len(place.stack.shape) == 1
        transposed = place.transposed or biases
        return place.stack.published if transposed else place.stack.untransposed


def _check(place: Place, name: str, shape: tuple[int, ...]) -> None:
    assert tuple(shape) == place.stack.shape, (name, shape)  # both are from config.json


class Stacking:
    """Stacking merges the experts' matrices in a stream of (name, tensor) into the stacked tensors
    in which the folder stores all experts of a layer.
    """

    def __init__(self, stacks: Sequence[Stack]):
        self._places = {
            name: place for stack in stacks for name, place in stack.places(transposed=True)
        }

    def planned(self, planned: Iterable[PlannedTensor]) -> list[PlannedTensor]:
        """Returns a description of each tensor that `stacked` yields for a stream of the `planned`
        tensors, in order.
        """
        found, missing = [], _Missing()
        for tensor in planned:
            place = self._places.get(tensor.name)
            if place is None:
                found.append(tensor)
            elif missing.is_last(place):
                found.append(PlannedTensor(place.stack.name, tensor.dtype, place.stack.published))
        return found

    def matrices(self, names: Iterable[str]) -> set[str]:
        """Returns `names`, tensors of a folder, with each stacked tensor's name replaced by the
        names of its matrices.
        """
        chosen = set(names)
        inside = {name for name, place in self._places.items() if place.stack.name in chosen}
        return inside | (chosen - {place.stack.name for place in self._places.values()})

    def stacked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields a stacked tensor as soon as its last matrix has arrived, and all other tensors
        unchanged.
        Incomplete stacked tensors are kept in memory; if the stream is ordered by layer, these are
        the stacked tensors of one layer.
        """
        missing, held = _Missing(), dict[str, Tensor]()
        for name, tensor in tensors:
            if (place := self._places.get(name)) is None:
                yield name, tensor
                continue
            stack = place.stack
            if stack.name not in held:
                held[stack.name] = torch.empty(stack.published, dtype=tensor.dtype)
            place.of(held[stack.name][place.expert]).copy_(tensor)
            if missing.is_last(place):
                yield stack.name, held.pop(stack.name)


class _Missing:
    """_Missing counts how many matrices of each stacked tensor have not arrived yet."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def is_last(self, place: Place) -> bool:
        """Counts the matrix at `place` as arrived, and returns whether it is the last one of its
        stacked tensor.
        """
        stack = place.stack
        left = self._left.get(stack.name, len(stack.matrices) * len(stack.matrices[0])) - 1
        self._left[stack.name] = left
        return left == 0
