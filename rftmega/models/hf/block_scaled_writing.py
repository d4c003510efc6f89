"""Writes weights as 8-bit floating-point numbers with one scale a block, as DeepSeek-V3's makers
publish theirs.
"""

from collections.abc import Iterable, Iterator, Set

import torch
from torch import Tensor

from rftmega.converters.block_scales import BlockScales
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import SCALES
from rftmega.models.hf.hf_folder import PlannedTensor
from rftmega.models.kernels.block_scaled import NUMBERS, quantise


class Quantising:
    """Quantising makes two tensors of each weight that a folder has quantised: numbers and scales."""

    def __init__(self, layout: BlockScales, names: Set[str]):
        """`names`: the weights that are quantised."""
        self._layout, self._names = layout, names

    def planned(self, planned: Iterable[PlannedTensor]) -> list[PlannedTensor]:
        """Returns what `quantised` will give for such a stream, in its order."""
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
        """Yields numbers and then scales of a weight that is quantised, and all else as it is.

        Raises CheckpointError for such a weight that is not finite.
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
