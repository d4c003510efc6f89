"""Plans which slice of which tensor goes from which rank to which: pure arithmetic, for any
layouts, without a process.

All is said in Hugging Face's tensors: a shard of Megatron's and what an engine's rank needs are
both lists of segments, rows (or columns) of those tensors. What a rank needs and does not hold must
reach it once: that is the least that can be moved.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from converters import Rule
from converters.rules import QKV, Column, Segment, Vocabulary

PIECE_BYTES = 32 * 2**20  # a larger slice is shared by its holders


class Slice(NamedTuple):
    """Rows (columns, by the rule's axis) start to stop of part `part` that `target` needs, and all
    who hold them.
    """

    target: int
    part: int
    start: int
    stop: int
    holders: tuple[int, ...]


class Transfer(NamedTuple):
    """One message's worth."""

    source: int
    target: int
    part: int
    start: int
    stop: int
    bytes: int


class Placement(NamedTuple):
    """Placement tells which ranks hold one Megatron tensor, and which ranks need what of it."""

    rule: Rule
    shards: tuple[tuple[int, ...], ...]  # shard number -> the trainer's ranks that hold it
    # (rank, what its engine needs); a colocated rank's number is its own
    needs: tuple[tuple[int, tuple[Segment, ...]], ...]


def slices(placement: Placement) -> list[Slice]:
    """Returns the slices that must be moved: each rank's needs, less what it holds itself, cut
    where the holders change.

    Raises ValueError where nobody holds what is needed.
    """
    held: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # part -> (start, stop, shard)
    for number in range(len(placement.shards)):
        for part, start, stop in placement.rule.segments(number, len(placement.shards)):
            if part >= 0:
                held[part].append((start, stop, number))
    found = []
    for target, needed in placement.needs:
        for part, start, stop in needed:
            at = start
            for low, high, number in sorted(held[part]):
                if high <= at or low >= stop:
                    continue
                if low > at:
                    break
                end = min(high, stop)
                if target not in placement.shards[number]:
                    found.append(Slice(target, part, at, end, placement.shards[number]))
                at = end
            if at < stop:
                raise ValueError(f"nobody holds {placement.rule.hf[part].name}[{at}:{stop}]")
    return found


@dataclass
class Balance:
    """The sources of a whole plan, chosen so that each sends about as much as its fellows."""

    itemsize: int  # bytes of an element
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _cut: dict[tuple[int, int, int], tuple[Placement, list[Slice]]] = field(default_factory=dict)

    def transfers(self, placement: Placement) -> Iterator[Transfer]:
        """Yields each slice, in pieces, from that of its holders which has sent least so far."""
        # Layers of one stage share these objects, and are cut alike; what is kept with the answer
        # keeps its id.
        key = (id(placement.rule), id(placement.shards), id(placement.needs))
        if key not in self._cut:
            self._cut[key] = placement, slices(placement)
        for target, part, start, stop, holders in self._cut[key][1]:
            shape = placement.rule.hf[part].shape
            row = math.prod(shape) // shape[placement.rule.axis] * self.itemsize
            step = max(1, PIECE_BYTES // row) if len(holders) > 1 else stop - start
            for begin in range(start, stop, step):
                end = min(begin + step, stop)
                source = min(holders, key=self.sent.__getitem__)
                self.sent[source] += (end - begin) * row
                self.received[target] += (end - begin) * row
                yield Transfer(source, target, part, begin, end, (end - begin) * row)

    @property
    def moved(self) -> int:
        """Bytes of all transfers so far."""
        return sum(self.received.values())


def engine_needs(rule: Rule, rank: int, ranks: int) -> tuple[Segment, ...]:
    """Returns the segments of a tensor that tensor-parallel rank `rank` of `ranks` of a vLLM engine
    loads.

    Query heads in blocks; key-value heads in blocks, or one of them where there are fewer heads
    than ranks; columns, rows and vocabulary in blocks (of the vocabulary padded to 64); everything
    else whole.
    """
    if isinstance(rule, QKV):
        queries, keys, _ = rule.sizes
        group, copies = keys // rule.groups, max(1, ranks // rule.groups)
        width = keys // ranks if rule.groups >= ranks else group
        begin = rank // copies * width
        block = queries // ranks
        both = (Segment(part, begin, begin + width) for part in (1, 2))
        return (Segment(0, rank * block, (rank + 1) * block), *both)
    if isinstance(rule, Vocabulary):
        size = rule.sizes[0]
        block = -(-size // 64) * 64 // ranks
        start, stop = (min(edge, size) for edge in (rank * block, (rank + 1) * block))
        return (Segment(0, start, stop),) if stop > start else ()
    if isinstance(rule, Column) and not rule.narrow:
        return tuple(
            Segment(part, rank * (size // ranks), (rank + 1) * (size // ranks))
            for part, size in enumerate(rule.sizes)
        )
    return tuple(Segment(part, 0, size) for part, size in enumerate(rule.sizes))


def spread(values: Mapping[int, int], ranks: Sequence[int]) -> float:
    """Returns the largest over the mean of the ranks' values; 1 is even."""
    seen = [values.get(rank, 0) for rank in ranks]
    return max(seen) * len(seen) / sum(seen) if any(seen) else 1.0
