"""Finds token sequences that begin alike, so that their common beginnings are computed once.

The sequences of a micro-batch become a tree of segments, which lie one after another in one packed
sequence: a beginning is followed by everything that continues it. A token attends to its own
segment and to the segments before it on the path from the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from rftmega.core.media_positions import RowImages
from rftmega.core.ragged import Ragged

SHORTEST = 16  # minimum length of a shared segment in tokens
FEWEST = 64  # minimum number of tokens that sharing a segment saves


class RowSegment(NamedTuple):
    """RowSegment is a run of packed tokens that the same rows contain."""

    start: int  # its first packed token
    stop: int
    end: int  # tokens from `stop` to `end` continue this segment
    before: int  # position of its first token in its rows
    parent: int  # index of the segment that it continues; -1: it begins its rows


class SharedTokens(NamedTuple):
    """SharedTokens maps the token grid [rows, columns] of a micro-batch to packed tokens."""

    segments: tuple[RowSegment, ...]  # without filler
    slots: Tensor  # [N] index in the flat grid of each packed token (of the first of equal ones)
    places: Tensor  # [rows * columns] packed token of each token of the grid; -1: there is none

    def predictions(self, columns: int) -> "Predictions":
        """Returns the distinct predictions of the next token in a grid with `columns` columns. A
        token that several rows share makes one prediction for all rows that also share the next
        token.
        """
        present = (self.places >= 0).nonzero()[:, 0]
        following = torch.cat([self.places[1:], self.places.new_full((1,), -1)])
        following[columns - 1 :: columns] = -1  # rows end there
        # the next packed token says which token is predicted, and after which
        key = torch.where(
            following >= 0, following, len(self.places) + torch.arange(len(following))
        )
        _, copies = key[present].unique(return_inverse=True)
        size = int(copies.max()) + 1 if len(copies) else 0
        # the first of equal ones, on every process
        distinct = present.new_full((size,), len(key)).scatter_reduce(0, copies, present, "amin")
        return Predictions(self.places[distinct], distinct, present, copies)


class Predictions(NamedTuple):
    """Predictions maps the m tokens of a grid to the n distinct predictions that they make."""

    places: Tensor  # [n] packed token that predicts
    slots: Tensor  # [n] index in the flat grid of one token that has the prediction
    present: Tensor  # [m] index in the flat grid of every token
    copies: Tensor  # [m] which of the n predictions it has


@dataclass(frozen=True, slots=True)
class SortedRows:
    """SortedRows holds rows in an order in which those that begin alike are neighbours."""

    order: Tensor  # [B] int64: indices of rows
    lengths: Tensor  # [B] int64: tokens of each row, in this order
    common: Tensor  # [B] int64: tokens that a row and the one before it, in this order, share

    @staticmethod
    def of(tokens: Any, lengths: Tensor, images: RowImages | None = None) -> "SortedRows":
        """Sorts rows by the first `lengths` [B] tokens of `tokens` (Ragged, or padded [B, T]). Rows
        with different `images` share nothing.
        """
        rows = tokens if isinstance(tokens, Ragged) else list(tokens)
        counts = lengths.tolist()
        ids = [row[:count].numpy() for row, count in zip(rows, counts, strict=True)]
        kinds = [0] * len(ids)
        if images is not None:
            numbers: dict[Any, int] = {}
            kinds = [numbers.setdefault(row, len(numbers)) for row in images.rows]
        keys = [own.astype(">i8").tobytes() for own in ids]
        order = sorted(range(len(ids)), key=lambda row: (kinds[row], keys[row], row))
        common = [0] * len(ids)
        for number, (one, other) in enumerate(zip(order, order[1:], strict=False), start=1):
            if kinds[one] == kinds[other]:
                common[number] = _common(ids[one], ids[other])
        index = torch.tensor(order, dtype=torch.int64)
        return SortedRows(index, lengths[index], torch.tensor(common, dtype=torch.int64))

    def select(self, rows: Sequence[int]) -> "SortedRows":
        """Returns the rows at the indices `rows` alone, numbered as in `rows`."""
        if not len(rows):
            return SortedRows(*(column[:0] for column in (self.order, self.lengths, self.common)))
        rank = torch.empty_like(self.order)
        rank[self.order] = torch.arange(len(self.order))
        ranks, order = rank[torch.as_tensor(rows, dtype=torch.int64)].sort()
        common = torch.zeros_like(ranks)
        if len(ranks) > 1:
            # two rows share as much as any two neighbours between them share
            behind = numpy.append(self.common.numpy(), 0)
            least = numpy.minimum.reduceat(behind, ranks.numpy() + 1)
            common[1:] = torch.from_numpy(least[:-1])
        return SortedRows(order, self.lengths[ranks], common)

    def run(self, first: int, end: int) -> "SortedRows":
        """Returns the rows at the places `first` to `end`, in this order, alone."""
        common = self.common[first:end].clone()
        common[:1] = 0
        return SortedRows(self.order[first:end], self.lengths[first:end], common)

    @property
    def shared(self) -> Tensor:
        """Returns [B]: of each row, in this order, the number of tokens that are computed with
        earlier rows.
        """
        return _divided(self.lengths.tolist(), self.common.tolist())[1]

    @property
    def computed(self) -> int:
        """Returns the number of tokens that are computed."""
        return int((self.lengths - self.shared).sum())

    def packed(self, columns: int) -> SharedTokens:
        """Returns the packed tokens of a grid with this many columns, whose rows begin at column 0."""
        segments, shared = _divided(self.lengths.tolist(), self.common.tolist())
        size = len(self.order) * columns
        places = torch.full((size,), -1)
        slots, packed = [], 0
        before = places[:0]
        for row, length, known in zip(
            self.order.tolist(), self.lengths.tolist(), shared.tolist(), strict=True
        ):
            first = row * columns
            own = places[first : first + length]
            own[:known] = before[:known]
            own[known:] = torch.arange(packed, packed + length - known)
            slots.append(torch.arange(first + known, first + length))
            packed += length - known
            before = own
        return SharedTokens(tuple(segments), torch.cat(slots) if slots else places[:0], places)


def _common(one: Any, other: Any) -> int:
    """Returns the number of equal leading elements of two arrays."""
    least = min(len(one), len(other))
    unequal = one[:least] != other[:least]
    return int(unequal.argmax()) if unequal.any() else least


def _divided(lengths: Sequence[int], common: Sequence[int]) -> tuple[list[RowSegment], Tensor]:
    """Divides sorted rows of these `lengths`, which have `common` tokens with the row before, into
    segments. Returns the segments in packed order, and the number of tokens that each row shares
    with earlier rows, [B].

    A common beginning becomes a segment if it is at least SHORTEST tokens longer than the beginning
    that it continues, and if sharing it saves at least FEWEST tokens. If a row ends and only one
    continuation is left, this continuation stays in the same segment.
    """
    shared = [0] * len(lengths)
    segments: list[RowSegment] = []
    packed = 0
    # rows [first, last] whose first `before` tokens are packed, the last `held` of them in a segment
    # that is not closed yet, which continues segment `parent`
    open_ranges = [(0, len(lengths) - 1, 0, 0, -1)] if lengths else []
    while open_ranges:
        first, last, before, held, parent = open_ranges.pop()
        alike = min(common[first + 1 : last + 1], default=lengths[first])
        more = alike - before
        single = first == last
        if single or (more >= SHORTEST and (last - first) * more >= FEWEST):
            packed, held, before = packed + more, held + more, alike
        starts = [first, *(row for row in range(first + 1, last + 1) if common[row] == alike)]
        for row in starts[1:]:
            shared[row] = before
        stops = [*(start - 1 for start in starts[1:]), last]
        parts = [(a, b) for a, b in zip(starts, stops, strict=True) if b > a or lengths[a] > before]
        if held and len(parts) != 1:
            start = packed - held
            segments.append(RowSegment(start, packed, packed, before - held, parent))
            held, parent = 0, len(segments) - 1
        open_ranges += [(a, b, before, held, parent) for a, b in reversed(parts)]
    ends = [segment.stop for segment in segments]
    for number in range(len(segments) - 1, -1, -1):
        over = segments[number].parent
        if over >= 0:
            ends[over] = max(ends[over], ends[number])
    found = [segment._replace(end=end) for segment, end in zip(segments, ends, strict=True)]
    return found, torch.tensor(shared, dtype=torch.int64)
