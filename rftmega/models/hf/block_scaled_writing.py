"""Writes FP8 weights with one scale per block, like DeepSeek-V3's published weights."""

from collections.abc import Iterable, Iterator, Set

import torch
from torch import Tensor

from rftmega.converters.block_scales import BlockScales
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import SCALES
from rftmega.models.hf.hf_folder import PlannedTensor
from rftmega.models.kernels.block_scaled import NUMBERS, quantise


class Quantising:
    """Quantising replaces selected weights in a stream of (name, tensor) by two tensors each: FP8
    numbers and scales.
    """

    def __init__(self, layout: BlockScales, names: Set[str]):
        """Stores the block layout and the `names` of the weights to quantise."""
        self._layout, self._names = layout, names

    def planned(self, planned: Iterable[PlannedTensor]) -> list[PlannedTensor]:
        """Returns a description of each tensor that `quantised` yields for a stream of the
        `planned` tensors, in order.
        """
        found = []
        for tensor in planned:
            if tensor.name not in self._names:
                found.append(tensor)
                continue
            rows, columns = tensor.shape
            blocks = (-(-rows // self._layout.rows), -(-columns // self._layout.columns))
            found.append(PlannedTensor(tensor.name, NUMBERS, tensor.shape))
            found.append(PlannedTensor(tensor.name + SCALES, torch.float32, blocks))
        return found

    def quantised(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the numbers and then the scales of each weight to quantise, and all other tensors
        unchanged.
        Raises CheckpointError if a weight to quantise contains NaN or infinity.
        """
        for name, tensor in tensors:
            if name not in self._names:
                yield name, tensor
                continue
            numbers, scales = quantise(tensor, self._layout.rows, self._layout.columns)
            if not scales.isfinite().all():
                raise CheckpointError(f"{name} holds NaN or infinity, so it is not written.")
            yield name, numbers
            yield name + SCALES, scales
