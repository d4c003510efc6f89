"""Writes weights as 8-bit floating-point numbers with one scale a block, as DeepSeek-V3's makers
publish theirs.
"""

from collections.abc import Iterable, Iterator, Set

import torch
from torch import Tensor

from rftmega.converters.block_scales import SUFFIX, BlockScales
from rftmega.errors import CheckpointError
from rftmega.hf_folders.hf_folder import PlannedTensor

NUMBERS = torch.float8_e4m3fn
LARGEST = torch.finfo(NUMBERS).max


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
            found.append(PlannedTensor(tensor.name + SUFFIX, torch.float32, blocks))
        return found

    def quantised(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields numbers and then scales of a weight that is quantised, and all else as it is.

        Raises CheckpointError for such a weight that is not finite.
        """
        for name, tensor in tensors:
            if name not in self._names:
                yield name, tensor
                continue
            numbers, scales = quantise(tensor, self._layout)
            if not scales.isfinite().all():
                raise CheckpointError(f"{name} holds NaN or infinity, so it is not written.")
            yield name, numbers
            yield name + SUFFIX, scales


def quantise(weight_RC: Tensor, layout: BlockScales) -> tuple[Tensor, Tensor]:
    """Returns numbers [R, C] in e4m3 and scales [blocks down, blocks across] in float32: the largest of a
    block becomes the largest number (arXiv:2412.19437, section 3.3.2). A block of zeros has scale 1.
    """
    rows, columns = weight_RC.shape
    down, across = -(-rows // layout.rows), -(-columns // layout.columns)
    padded = weight_RC.new_zeros(down * layout.rows, across * layout.columns, dtype=torch.float32)
    padded[:rows, :columns] = weight_RC
    blocks = padded.view(down, layout.rows, across, layout.columns)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    numbers = (blocks / scales[:, None, :, None]).to(NUMBERS)
    return numbers.view(padded.shape)[:rows, :columns].contiguous(), scales
