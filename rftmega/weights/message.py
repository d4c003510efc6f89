"""Slices on their way from one process to another: one flat message a bucket, with the push's version and a checksum a slice."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rftmega.errors import EngineError
from rftmega.weights.units import Unit

ALIGNED = 64  # bytes: every slice begins at a multiple, and its checksum is over whole multiples
LANES = torch.tensor([1, 3, 5, 7, 11, 13, 17, 19])  # odd, and different: words that change places change the sum


class Move(NamedTuple):
    """Rows (columns, by the rule's axis) start to stop of a unit's HF tensor `part`."""

    unit: Unit
    part: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.unit.planned[self.part].name

    @property
    def shape(self) -> torch.Size:
        shape = list(self.unit.rule.hf[self.part].shape)
        shape[self.unit.rule.axis] = self.stop - self.start
        return torch.Size(shape)

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.unit.dtype.itemsize


def message_for(moves: Sequence[Move], device: torch.device) -> Tensor:
    """[bytes], with nothing in it yet."""
    return torch.empty(_places(moves)[-1], dtype=torch.uint8, device=device)


def written(message: Tensor, moves: Sequence[Move], version: int, slice_of: Callable[[Move], Tensor]) -> Tensor:
    """The message with the version, the checksums and the slices in it."""
    for move, start in zip(moves, _places(moves), strict=False):
        message[start : start + move.bytes].view(move.unit.dtype).view(move.shape).copy_(slice_of(move))
    header = _header(message, moves)
    header[0] = version
    header[1:] = _checksums(message, moves)
    return message


def opened(message: Tensor, moves: Sequence[Move], version: int, source: int) -> Iterator[tuple[Move, Tensor]]:
    """Each slice. Raises EngineError where the message is another push's, or a slice is not as it was sent."""
    header = _header(message, moves)
    if header[0] != version:
        raise EngineError(f"Process {source} sent push {int(header[0])} while this one takes push {version}.")
    wrong = (header[1:] != _checksums(message, moves)).nonzero()
    if len(wrong):
        move = moves[int(wrong[0])]
        raise EngineError(f"{move.name}[{move.start}:{move.stop}] of push {version} came damaged from process {source}.")
    for move, start in zip(moves, _places(moves), strict=False):
        yield move, message[start : start + move.bytes].view(move.unit.dtype).view(move.shape)


def _header(message: Tensor, moves: Sequence[Move]) -> Tensor:
    return message[: 8 * (1 + len(moves))].view(torch.int64)


def _places(moves: Sequence[Move]) -> list[int]:
    """Where each slice begins, and where the message ends."""
    places = [_aligned(8 * (1 + len(moves)))]
    for move in moves:
        places.append(places[-1] + _aligned(move.bytes))
    return places


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _checksums(message: Tensor, moves: Sequence[Move]) -> Tensor:
    """[slices], of what is in the message, gaps behind the slices included."""
    places = _places(moves)
    lanes = [
        message[start:stop].view(torch.int64).view(-1, len(LANES)).sum(0) for start, stop in zip(places, places[1:], strict=False)
    ]
    return (torch.stack(lanes) * LANES.to(message.device)).sum(1)
