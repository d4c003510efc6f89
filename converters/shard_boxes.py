"""Divides a range of a flattened tensor, such as a distributed optimizer's shard, into rectangular
blocks (boxes) of the tensor.
"""

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yields (offset, shape) of blocks that together cover elements begin ... end - 1 of a
    flattened tensor of `shape`, in that order.
    At most 2 n - 1 blocks for n dimensions; each is contiguous in the flattened tensor.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    first, *rest = shape
    row = math.prod(rest)
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    head = -(-begin // row)  # the first whole row
    tail = end // row  # after the last whole row
    if head > tail:  # within one row
        yield from _within(tail, rest, begin - tail * row, end - tail * row)
        return
    yield from _within(head - 1, rest, begin - (head - 1) * row, row) if head * row > begin else ()
    if head < tail:
        yield (head, *[0] * len(rest)), (tail - head, *rest)
    yield from _within(tail, rest, 0, end - tail * row)


def _within(row: int, shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    for offset, size in boxes_of(shape, begin, end):
        yield (row, *offset), (1, *size)
