"""Copies the tensors that a process saves to host memory, so that training continues while the
copies are written.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.core.shards import ShardBox
from rftmega.runtime import device

ALIGNED = 64  # bytes
# threads: training is paused meanwhile, and one thread does not saturate the memory channels
COPIERS = 2


class Snapshot(NamedTuple):
    """Snapshot holds copied blocks (boxes) of tensors as (key, offset, elements), and the shapes of
    the whole tensors by key.
    """

    boxes: Sequence[tuple[str, tuple[int, ...], Tensor]]
    shapes: dict[str, tuple[int, ...]]

    def beside(self, tensors: Mapping[str, Tensor]) -> "Snapshot":
        """Returns a Snapshot with the blocks of this one and with `tensors` (by key) as whole
        tensors.
        """
        boxes = [(key, (0,) * tensor.dim(), tensor) for key, tensor in tensors.items()]
        return Snapshot(
            [*self.boxes, *boxes],
            self.shapes | {key: tuple(tensor.shape) for key, tensor in tensors.items()},
        )


class HostCopies:
    """HostCopies owns the host memory of a snapshot; the next snapshot reuses the same memory."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, held: Iterable[tuple[str, ShardBox]]) -> Snapshot:
        """Copies the blocks that this process writes (`ShardBox.written`) to host memory. `held`:
        (prefix of the key, block) of all blocks on this process.

        Overwrites the previous snapshot.
        """
        found = list(held)
        written = [(prefix, each) for prefix, each in found if each.written]
        sizes = [-(-each.tensor.nbytes // ALIGNED) * ALIGNED for _, each in written]
        if sum(sizes) > len(self._memory):
            self._memory = device.current().host_buffer(sum(sizes), torch.uint8)
        boxes, at = [], 0
        for (prefix, each), size in zip(written, sizes, strict=True):
            tensor = each.tensor
            place = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            boxes.append((f"{prefix}/{each.key}", each.offset, place))
            at += size
        with ThreadPoolExecutor(COPIERS) as pool:
            list(
                pool.map(
                    _copy, (place for _, _, place in boxes), (each.tensor for _, each in written)
                )
            )
        device.current().synchronize()
        return Snapshot(boxes, {f"{prefix}/{each.key}": each.shape for prefix, each in found})

    @property
    def bytes(self) -> int:
        return math.prod(self._memory.shape)


@torch.no_grad()
def _copy(place: Tensor, tensor: Tensor) -> None:
    place.copy_(tensor, non_blocking=True)
