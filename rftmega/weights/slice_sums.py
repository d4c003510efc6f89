"""Checksums of every slice of the last push: as the trainer holds it now, as it was sent, and as it
arrived at the loader.

They are kept where they were computed, and compared only when somebody asks why engine and trainer
differ.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from rftmega.parallel.checksum import checksums
from rftmega.parallel.collectives import gather_objects
from rftmega.types import SliceChecksums
from rftmega.weights.units import Move, Shards

SliceKey = tuple[str, int, int, int, int]  # tensor, first and last row, source, target


def sum_of(elements: Tensor) -> int:
    """Returns the checksum that a message has of the same slice."""
    return int(checksums(elements[None]))


class SliceSums:
    """SliceSums records what one process sends, receives and uses of its own in one push."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, Sequence[Move], Tensor]] = []
        self._received: list[tuple[int, Sequence[Move], Tensor]] = []
        self._own: list[tuple[Sequence[Move], Tensor]] = []

    def sent(self, target: int, moves: Sequence[Move], sums: Tensor) -> None:
        """Records the `sums` [slices] of a message to process `target`."""
        self._sent.append((target, moves, sums))

    def received(self, source: int, moves: Sequence[Move], sums: Tensor) -> None:
        """Records the `sums` [slices] of a message from process `source`."""
        self._received.append((source, moves, sums))

    def used(self, moves: Sequence[Move], sums: Tensor) -> None:
        """Records the `sums` [slices] of what this process's engine takes from the trainer's own
        shard.
        """
        self._own.append((moves, sums))

    def compared(self, shards: Shards) -> list[SliceChecksums]:
        """Compares all processes' slices of the last push; a collective, alike everywhere.

        Weights must be on the device.
        """
        me = dist.get_rank()
        held: dict[SliceKey, int] = {}
        sent: dict[SliceKey, int] = {}
        received: dict[SliceKey, int] = {}
        for target, moves, sums in self._sent:
            for move, total in zip(moves, sums.tolist(), strict=True):
                place = (move.name, move.start, move.stop, me, target)
                held[place] = sum_of(shards.slice_of(move))
                sent[place] = total
        for source, moves, sums in self._received:
            for move, total in zip(moves, sums.tolist(), strict=True):
                received[move.name, move.start, move.stop, source, me] = total
        for moves, sums in self._own:
            for move, total in zip(moves, sums.tolist(), strict=True):
                place = (move.name, move.start, move.stop, me, me)
                held[place] = sum_of(shards.slice_of(move))
                sent[place] = received[place] = total
        return _joined(gather_objects((held, sent, received)))


def _joined(
    told: Sequence[tuple[dict[SliceKey, int], dict[SliceKey, int], dict[SliceKey, int]]],
) -> list[SliceChecksums]:
    """Joins the slices that each process told of.

    One that was sent and never arrived has None as what was received.
    """
    held, sent, received = (
        {place: total for part in told for place, total in part[i].items()} for i in range(3)
    )
    places = sorted(held.keys() | sent.keys() | received.keys())
    return [
        SliceChecksums(*place, held.get(place), sent.get(place), received.get(place))
        for place in places
    ]
