"""Slices on their way from one process to another: one flat message a bucket, with the push's version and a checksum a slice."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rftmega.errors import EngineError
from rftmega.parallel.checksum import blocks, checksum
from rftmega.weights.units import Move


def message_bytes(sizes: Sequence[int]) -> int:
    """Of a message with slices of so many bytes each, header and gaps included."""
    return blocks(8 * (1 + len(sizes))) + sum(map(blocks, sizes))


def message_for(moves: Sequence[Move], device: torch.device) -> Tensor:
    """[bytes], with nothing in it yet."""
    return torch.empty(message_bytes([move.bytes for move in moves]), dtype=torch.uint8, device=device)


def written(message: Tensor, moves: Sequence[Move], version: int, slice_of: Callable[[Move], Tensor]) -> Tensor:
    """The message with the version, the checksums and the slices in it."""
    for move, start in zip(moves, _places(moves), strict=False):
        message[start : start + move.bytes].view(move.unit.dtype).view(move.shape).copy_(slice_of(move))
        message[start + move.bytes : start + blocks(move.bytes)].zero_()  # the checksum covers it
    header = _header(message, moves)
    header[0] = version
    header[1:] = checksums_of(message, moves)
    return message


def opened(message: Tensor, moves: Sequence[Move], version: int, source: int) -> Iterator[tuple[Move, Tensor]]:
    """Each slice. Raises EngineError where the message is another push's, or a slice is not as it was sent."""
    header = _header(message, moves)
    if header[0] != version:
        raise EngineError(f"Process {source} sent push {int(header[0])} while this one takes push {version}.")
    wrong = (header[1:] != checksums_of(message, moves)).nonzero()
    if len(wrong):
        move = moves[int(wrong[0])]
        raise EngineError(f"{move.name}[{move.start}:{move.stop}] of push {version} came damaged from process {source}.")
    for move, start in zip(moves, _places(moves), strict=False):
        yield move, message[start : start + move.bytes].view(move.unit.dtype).view(move.shape)


def sums_of(message: Tensor, moves: Sequence[Move]) -> Tensor:
    """[slices]: the checksums that were written into the message."""
    return _header(message, moves)[1:].clone()


def _header(message: Tensor, moves: Sequence[Move]) -> Tensor:
    return message[: 8 * (1 + len(moves))].view(torch.int64)


def _places(moves: Sequence[Move]) -> list[int]:
    """Where each slice begins, and where the message ends."""
    places = [blocks(8 * (1 + len(moves)))]
    for move in moves:
        places.append(places[-1] + blocks(move.bytes))
    return places


def checksums_of(message: Tensor, moves: Sequence[Move]) -> Tensor:
    """[slices], of what is in the message, gaps behind the slices included."""
    places = _places(moves)
    return torch.stack([checksum(message[start:stop]) for start, stop in pairwise(places)])
