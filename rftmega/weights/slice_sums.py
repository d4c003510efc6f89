"""Checksums of every slice of the last push: as the trainer holds it now, as it was sent, and as it arrived at the loader.

They are kept where they were computed, and compared only when somebody asks why engine and trainer differ.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.parallel.checksum import blocks, checksum
from rftmega.parallel.collectives import gather_objects
from rftmega.types import SliceChecksums
from rftmega.weights.units import Move, Shards, Unit

Place = tuple[str, int, int, int, int]  # tensor, first and last row, source, target


def padded_checksum(elements: Tensor) -> Tensor:
    """[] int64 of elements, which need not lie side by side, as a message with zeros behind them has it."""
    size = elements.numel() * elements.element_size()
    memory = torch.zeros(blocks(size), dtype=torch.uint8, device=elements.device)
    memory[:size].view(elements.dtype).view(elements.shape).copy_(elements)
    return checksum(memory)


class SliceSums:
    """SliceSums records what one process sends, receives and uses of its own in one push."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, Sequence[Move], Tensor]] = []
        self._received: list[tuple[int, Sequence[Move], Tensor]] = []
        self._own: list[tuple[Move, Tensor]] = []

    def sent(self, target: int, moves: Sequence[Move], sums: Tensor) -> None:
        """`sums` [slices] of a message to process `target`."""
        self._sent.append((target, moves, sums))

    def received(self, source: int, moves: Sequence[Move], sums: Tensor) -> None:
        """`sums` [slices] of a message from process `source`."""
        self._received.append((source, moves, sums))

    def used(self, unit: Unit, part: int, start: int, elements: Tensor) -> None:
        """Rows from `start` on of a tensor that this process's engine reads from the trainer's own shard."""
        stop = start + elements.shape[unit.rule.axis]
        self._own.append((Move(unit, part, start, stop), padded_checksum(elements)))

    def compared(self, shards: Shards) -> list[SliceChecksums]:
        """All slices of the last push, everybody's; a collective, the same on every process. Weights must be on the device."""
        me = dist.get_rank()
        held: dict[Place, int] = {}
        sent: dict[Place, int] = {}
        received: dict[Place, int] = {}
        for target, moves, sums in self._sent:
            for move, total in zip(moves, sums.tolist(), strict=True):
                place = (move.name, move.start, move.stop, me, target)
                held[place] = int(padded_checksum(shards.slice_of(move)))
                sent[place] = total
        for source, moves, sums in self._received:
            for move, total in zip(moves, sums.tolist(), strict=True):
                received[move.name, move.start, move.stop, source, me] = total
        for move, sum_ in self._own:
            place = (move.name, move.start, move.stop, me, me)
            held[place] = int(padded_checksum(shards.slice_of(move)))
            sent[place] = received[place] = int(sum_)
        return _joined(gather_objects((held, sent, received)))


def _joined(told: Sequence[tuple[dict[Place, int], dict[Place, int], dict[Place, int]]]) -> list[SliceChecksums]:
    """The slices that each process told of. One that was sent and never arrived has None as what was received."""
    held, sent, received = ({place: total for part in told for place, total in part[i].items()} for i in range(3))
    places = sorted(held.keys() | sent.keys() | received.keys())
    return [SliceChecksums(*place, held.get(place), sent.get(place), received.get(place)) for place in places]
