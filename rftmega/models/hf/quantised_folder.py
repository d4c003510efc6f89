"""Opens folders of quantised weights, of each format that can be read, and writes such folders."""

from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rftmega.converters.block_scales import block_scales
from rftmega.converters.mxfp4 import mxfp4
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.block_scaled_files import BlockScaledFolder, BlockScaledFormat
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor
from rftmega.models.hf.mxfp4_files import MXFP4Folder, MXFP4Format


def is_quantised(hf_config: Mapping[str, Any]) -> bool:
    """Returns whether config.json describes quantised weights. Raises CheckpointError for a format
    that can't be read.
    """
    return mxfp4(hf_config) is not None or block_scales(hf_config) is not None


def open_quantised(folder: str | Path, hf_config: Mapping[str, Any]) -> HFFolder:
    """Opens a folder whose weights are quantised as its `hf_config` says, or plain; each weight is
    read in the model's dtype. Raises CheckpointError as the reader of the format does.
    """
    if packed := mxfp4(hf_config):
        return MXFP4Folder(folder, packed)
    if scales := block_scales(hf_config):
        return BlockScaledFolder(folder, scales)
    return HFFolder(folder)


class Format(Protocol):
    """Format is the interface of a format that stores a weight as several tensors."""

    def planned(self, tensor: PlannedTensor) -> list[PlannedTensor]: ...

    def stored(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]: ...


class Quantising:
    """Quantising replaces selected weights in a stream of (name, tensor) by the tensors that a
    format stores them as.
    """

    def __init__(self, layout: Format, names: Set[str]):
        """Stores the format and the `names` of the weights to quantise."""
        self._layout, self._names = layout, names

    @classmethod
    def like(cls, folder: Path, hf_config: Mapping[str, Any]) -> "Quantising":
        """Returns a Quantising with the format and the quantised weights of `folder`.

        Raises CheckpointError if its weights are not quantised.
        """
        if packed := mxfp4(hf_config):
            return cls(MXFP4Format(), MXFP4Folder(folder, packed).packed)
        if (scales := block_scales(hf_config)) is None:
            raise CheckpointError(f"{folder} has no quantised weights, as which to write others.")
        return cls(BlockScaledFormat(scales), BlockScaledFolder(folder, scales).scaled)

    def planned(self, planned: Iterable[PlannedTensor]) -> list[PlannedTensor]:
        """Returns a description of each tensor that `quantised` yields for a stream of the
        `planned` tensors, in order.
        """
        return [
            part
            for tensor in planned
            for part in (self._layout.planned(tensor) if tensor.name in self._names else [tensor])
        ]

    def quantised(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the stored tensors of each weight to quantise, and all other tensors unchanged.
        Raises CheckpointError if a weight to quantise contains NaN or infinity.
        """
        for name, tensor in tensors:
            if name in self._names:
                yield from self._layout.stored(name, tensor)
            else:
                yield name, tensor
