"""Checksums of every slice of the last push: of the trainer's weights now, of the slice as it was
sent, and of the slice as it reached the loader.

Each process keeps the checksums that it computed; they are gathered and compared only to diagnose a
difference between engine and trainer.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from rftmega.core.shards import Box
from rftmega.core.types import SliceChecksums
from rftmega.runtime.parallel.checksum import checksums
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.weights.slices import LocalShards, TensorSlice

SliceKey = tuple[str, Box, int, int]  # tensor, box, source, target


def sum_of(elements: Tensor) -> int:
    """Returns the checksum of a tensor slice; a message of a push stores the same value for the
    slice.
    """
    return int(checksums(elements[None]))


class SliceSums:
    """SliceSums records the checksums of the slices that one process sends, receives and takes from
    its own shard in one push.
    """

    def __init__(self) -> None:
        self._sent: list[tuple[int, Sequence[TensorSlice], Tensor]] = []
        self._received: list[tuple[int, Sequence[TensorSlice], Tensor]] = []
        self._own: list[tuple[Sequence[TensorSlice], Tensor]] = []

    def sent(self, target: int, slices: Sequence[TensorSlice], sums: Tensor) -> None:
        """Records the checksums `sums` [slices] of a message sent to process `target`."""
        self._sent.append((target, slices, sums))

    def received(self, source: int, slices: Sequence[TensorSlice], sums: Tensor) -> None:
        """Records the checksums `sums` [slices] of a message received from process `source`."""
        self._received.append((source, slices, sums))

    def used(self, slices: Sequence[TensorSlice], sums: Tensor) -> None:
        """Records the checksums `sums` [slices] of the slices that this process's engine takes from
        the trainer's own shard.
        """
        self._own.append((slices, sums))

    def compared(self, shards: LocalShards) -> list[SliceChecksums]:
        """Returns the checksums of all processes' slices of the last push, with the checksums of
        the trainer's weights now; a collective with the same result on every process. `shards`:
        this process's shards.

        The weights must be on the device.
        """
        me = dist.get_rank()
        held: dict[SliceKey, int] = {}
        sent: dict[SliceKey, int] = {}
        received: dict[SliceKey, int] = {}
        for target, slices, sums in self._sent:
            for each, total in zip(slices, sums.tolist(), strict=True):
                place = (each.name, each.box, me, target)
                held[place] = sum_of(shards.slice_of(each))
                sent[place] = total
        for source, slices, sums in self._received:
            for each, total in zip(slices, sums.tolist(), strict=True):
                received[each.name, each.box, source, me] = total
        for slices, sums in self._own:
            for each, total in zip(slices, sums.tolist(), strict=True):
                place = (each.name, each.box, me, me)
                held[place] = sum_of(shards.slice_of(each))
                sent[place] = received[place] = total
        return _joined(gather_objects((held, sent, received)))


def _joined(
    told: Sequence[tuple[dict[SliceKey, int], dict[SliceKey, int], dict[SliceKey, int]]],
) -> list[SliceChecksums]:
    """Merges the checksums reported by each process. `told`: for each process the checksums now, as
    sent and as received, each by slice.

    A slice that was sent and never arrived has None for the received checksum.
    """
    held, sent, received = (
        {place: total for part in told for place, total in part[i].items()} for i in range(3)
    )
    places = sorted(held.keys() | sent.keys() | received.keys())
    return [
        SliceChecksums(*place, held.get(place), sent.get(place), received.get(place))
        for place in places
    ]
