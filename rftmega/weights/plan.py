"""Plans which slice of which tensor goes from which rank to which. This is pure arithmetic for any
parallel layouts and needs no processes.

Both the trainer ranks' shards and the engine ranks' needs are blocks (boxes) of Hugging Face
tensors. Each element that a rank needs and does not hold must reach it once: the lower bound of the
bytes moved.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rftmega.core.shards import Box, LogicalTensor, intersection, remaining, shape_of
from rftmega.weights.slices import TensorSlice

PIECE_BYTES = 32 * 2**20  # larger slices are split among their holders
# (engine rank, its needs as (number of the HF tensor, box)); a colocated engine rank has the
# trainer's rank number
RankNeeds = tuple[tuple[int, tuple[tuple[int, Box], ...]], ...]


class Cut(NamedTuple):
    """Cut is a block (box) of an HF tensor that rank `target` needs and does not hold, with all
    ranks that hold the block.
    """

    target: int
    number: int  # of the HF tensor
    box: Box
    holders: tuple[int, ...]


class Transfer(NamedTuple):
    """Transfer is a slice to be sent from rank `source` to rank `target`."""

    source: int
    target: int
    slice: TensorSlice


def cuts(tensor: LogicalTensor, needs: RankNeeds) -> list[Cut]:
    """Returns the blocks (boxes) of `tensor` that must be moved: the blocks that each rank needs
    minus the blocks that it holds, split so that all elements of a block have the same holders.
    `needs`: for each rank, the blocks that its engine reads.

    Raises ValueError if no rank holds a needed element.
    """
    held: dict[int, list[tuple[Box, tuple[int, ...]]]] = defaultdict(list)
    for holding, ranks in tensor.holders:
        for number, box in holding:
            held[number].append((box, ranks))
    for pieces in held.values():
        pieces.sort()
    found = []
    for target, needed in needs:
        for number, box in needed:
            own = [here for here, ranks in held[number] if target in ranks]
            left = remaining(box, own)
            for here, ranks in held[number]:
                if not left:
                    break
                common = [intersection(each, here) for each in left]
                found += [Cut(target, number, each, ranks) for each in common if each is not None]
                left = [rest for each in left for rest in remaining(each, [here])]
            if left:
                raise ValueError(f"nobody holds {TensorSlice(tensor, number, left[0])}")
    return found


@dataclass
class Balance:
    """Balance chooses the senders of a plan's transfers so that the ranks that hold a slice send
    about equally many bytes.
    """

    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _cut: dict[tuple[int, int, int], tuple[LogicalTensor, RankNeeds, list[Cut]]] = field(
        default_factory=dict
    )

    def transfers(self, tensor: LogicalTensor, needs: RankNeeds) -> Iterator[Transfer]:
        """Yields the transfers that bring each rank the blocks of `tensor` that it needs (`needs`)
        and does not hold. A slice with several holders is split (PIECE_BYTES); each part is sent by
        the holder that has sent the fewest bytes so far.
        """
        # Layers of one stage share these objects and are cut alike. The cache keeps references to
        # them, so that ids stay valid.
        key = (id(tensor.shapes), id(tensor.holders), id(needs))
        if key not in self._cut:
            self._cut[key] = tensor, needs, cuts(tensor, needs)
        for target, number, box, holders in self._cut[key][2]:
            for piece in _pieces(box, tensor.dtype.itemsize if len(holders) > 1 else 0):
                part = TensorSlice(tensor, number, piece)
                source = min(holders, key=self.sent.__getitem__)
                self.sent[source] += part.bytes
                self.received[target] += part.bytes
                yield Transfer(source, target, part)

    @property
    def moved(self) -> int:
        """Returns the total size in bytes of all transfers so far."""
        return sum(self.received.values())


def _pieces(box: Box, itemsize: int) -> Iterator[Box]:
    """Splits a block (box) along its first dimension into parts of at most PIECE_BYTES (at least
    one row), and yields them. `itemsize`: bytes per element; 0: the block is yielded unchanged.
    """
    (start, stop), *rest = box
    row = math.prod(shape_of(tuple(rest))) * itemsize
    step = max(1, PIECE_BYTES // row) if row else max(1, stop - start)
    for begin in range(start, stop, step):
        yield ((begin, min(begin + step, stop)), *rest)


def spread(values: Mapping[int, int], ranks: Sequence[int]) -> float:
    """Returns how unevenly `values` (e.g. bytes sent, by rank) are distributed over `ranks`: the
    largest value divided by the mean; 1 means perfectly balanced.
    """
    seen = [values.get(rank, 0) for rank in ranks]
    return max(seen) * len(seen) / sum(seen) if any(seen) else 1.0
