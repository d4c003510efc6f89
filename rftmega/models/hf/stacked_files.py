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
from rftmega.converters.stacks import Place, Stack
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor, checksum, read_into
from rftmega.models.hf.quantised_folder import is_quantised, open_quantised


def open_folder(folder: str | Path, hf_config: Mapping[str, Any]) -> HFFolder:
    """Opens the weights of a folder with the reader that its config requires: quantised, stacked or
    plain.
    Raises CheckpointError as the readers do, and for a folder with both stacked and quantised
    weights.
    """
    stacks = stacks_of(hf_config)
    if stacks and is_quantised(hf_config):
        raise CheckpointError(
            f"{folder}: quantised weights of a family whose folders hold a layer's experts in one tensor are not read. Convert "
            f"the folder first: rftmega convert to-plain {folder} OUT"
        )
    return UnstackedFolder(folder, stacks) if stacks else open_quantised(folder, hf_config)


class MatrixSlice:
    """MatrixSlice reads slices of one expert's matrix within a stacked tensor."""

    def __init__(self, stored: Any, place: Place):
        self._stored, self._place = stored, place

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = rows.indices(self._place.stack.shape[0])
        here = slice(self._place.start + start, self._place.start + stop)
        if self._place.transposed:
            found: Tensor = self._stored[self._place.expert, columns, here]
            return found.T
        straight: Tensor = self._stored[self._place.expert, here, columns]
        return straight


class UnstackedFolder(HFFolder):
    """UnstackedFolder is an HFFolder that presents each matrix of a stacked tensor as a separate
    tensor.
    """

    def __init__(self, folder: str | Path, stacks: Sequence[Stack]):
        """Opens the folder; `stacks` describes the stacked tensors that it may contain.

        Raises CheckpointError if a stacked tensor has an unexpected shape, or if a matrix is also
        stored as a separate tensor.
        """
        super().__init__(folder)
        self._places: dict[str, Place] = {}
        for stack in stacks:
            if super().__contains__(stack.name):
                self._places |= stack.places(transposed=self._is_transposed(stack))
        self._stacked = {place.stack.name for place in self._places.values()}
        if twice := sorted(self._places.keys() & set(super().names)):
            stack = self._places[twice[0]].stack
            raise CheckpointError(
                f"{self.folder} holds {twice[0]!r}, and once more in {stack.name!r}. Remove one of them."
            )

    def _is_transposed(self, stack: Stack) -> bool:
        shape = super().shape_of(stack.name)
        if shape not in (stack.published, stack.untransposed):
            raise CheckpointError(
                f"{self.folder}: {stack.name} has shape {shape}; config.json asks for {stack.published}, or as transformers 5 "
                f"writes it {stack.untransposed}."
            )
        return shape == stack.published

    def __contains__(self, name: str) -> bool:
        return name in self._places or (super().__contains__(name) and name not in self._stacked)

    @property
    def names(self) -> Iterable[str]:
        return [*(name for name in super().names if name not in self._stacked), *self._places]

    def slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        if (place := self._places.get(name)) is None:
            return super().slice_of(name, shape)
        self.dtype_of(name)
        _check(place, name, shape)
        stack = place.stack
        return MatrixSlice(self._file(self._holder(stack.name)).get_slice(stack.name), place)

    def fill(self, targets: Sequence[Tensor], name: str, shape: tuple[int, ...]) -> str:
        if (place := self._places.get(name)) is None:
            return super().fill(targets, name, shape)
        _check(place, name, shape)
        matrix = place.of(self._expert(place)).contiguous()
        for target, rows in zip(
            targets, matrix.split([len(each) for each in targets]), strict=True
        ):
            target.copy_(rows)
        return checksum(matrix)

    def _expert(self, place: Place) -> Tensor:
        """Reads all matrices of the expert of `place` in its stacked tensor; they are contiguous in
        the file.
        """
        name = place.stack.name
        file, said = self._holder(name), self._said(name)
        start, _ = self._header(file)
        matrices = torch.empty(said["shape"][1:], dtype=super().dtype_of(name))
        with (self.folder / file).open("rb", buffering=0) as stream:
            stream.seek(start + said["data_offsets"][0] + place.expert * matrices.nbytes)
            read_into(stream, matrices, f"{self.folder / file}: {name}")
        return matrices

    def dtype_of(self, name: str) -> torch.dtype:
        place = self._places.get(name)
        return super().dtype_of(place.stack.name if place else name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        return place.stack.shape if place else super().shape_of(name)


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
