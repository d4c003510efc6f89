"""Packs rows or groups of rows into micro-batches under caps, for all ranks at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy


class Sizes(NamedTuple):
    """Sizes holds the sizes of rows for which a micro-batch has a limit, or these limits."""

    tokens: float
    squares: float  # of the rows' lengths
    patches: float
    grid: float  # rows x longest
    cost: float

    def fit(self, caps: "Sizes") -> bool:
        return all(size <= cap for size, cap in zip(self, caps, strict=True))


ADDED = ("tokens", "squares", "patches", "cost")  # sizes that add up over items


class Batch(NamedTuple):
    """Batch is a micro-batch: its rows and its cost."""

    rows: list[int]
    cost: float


class Items:
    """Items are rows or groups of rows, divided over ranks, each of which gets packed as a whole."""

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        sizes: Sequence[Sizes],
        *,
        by: str,
    ):
        """Creates the items, each with its `rows` and `sizes`; `ranks` lists the items of each
        rank. The items with the largest size called `by` are packed first.
        """
        self.rows = rows
        first = [getattr(each, by) for each in sizes]
        ordered = [sorted(own, key=lambda item: (-first[item], item)) for own in ranks]
        most = max(map(len, ordered))
        self.order = numpy.full((len(ranks), most), -1)
        for rank, own in enumerate(ordered):
            self.order[rank, : len(own)] = own
        table = numpy.array(
            [[getattr(each, name) for name in ADDED] for each in sizes], dtype=numpy.float64
        )
        nothing = numpy.zeros((1, len(ADDED)))
        # [rank, item, kind]; 0 where a rank has fewer items
        self.sizes = numpy.concatenate([table.reshape(-1, len(ADDED)), nothing])[self.order]
        # [rank, item]: number of rows, and tokens of the longest
        members = [len(own) for own in rows]
        longest = [each.grid / count for each, count in zip(sizes, members, strict=True)]
        self.members, self.longest = (
            numpy.array([*of_items, 0.0])[self.order] for of_items in (members, longest)
        )

    def packed(
        self, caps: Sequence[Sizes], count: int, *, cheapest: bool
    ) -> list[list[Batch] | None]:
        """Packs each rank's items in at most `count` micro-batches within the rank's `caps`: each
        item into the cheapest one with room, or if not `cheapest` into the first one. Returns None
        for a rank whose items don't have room.
        """
        limits = numpy.array([[getattr(cap, name) for name in ADDED] for cap in caps])
        grids = numpy.array([[cap.grid] for cap in caps])
        loads = numpy.zeros((len(caps), count, len(ADDED)))
        members, longest = numpy.zeros((2, len(caps), count))
        places = numpy.full(self.order.shape, -1)
        fits = numpy.ones(len(caps), dtype=bool)
        ranks = numpy.arange(len(caps))
        for item in range(self.order.shape[1]):
            own = self.sizes[:, item]
            more = members + self.members[:, item, None]
            widest = numpy.maximum(longest, self.longest[:, item, None])
            room = (loads + own[:, None] <= limits[:, None]).all(-1) & (more * widest <= grids)
            costs = loads[..., -1] if cheapest else numpy.zeros(room.shape)
            place = numpy.where(room, costs, numpy.inf).argmin(1)
            fits &= room.any(1)
            loads[ranks, place] += own
            members[ranks, place] = more[ranks, place]
            longest[ranks, place] = widest[ranks, place]
            places[:, item] = place
        return [
            self._batches(*rank) if fit else None
            for *rank, fit in zip(
                self.order.tolist(), places.tolist(), loads[..., -1].tolist(), fits, strict=True
            )
        ]

    def _batches(
        self, items: Sequence[int], places: Sequence[int], costs: Sequence[float]
    ) -> list[Batch]:
        rows: list[list[int]] = [[] for _ in costs]
        for item, place in zip(items, places, strict=True):
            if item >= 0:
                rows[place] += self.rows[item]
        return [Batch(own, cost) for own, cost in zip(rows, costs, strict=True) if own]

    @property
    def costliest(self) -> float:
        """Returns the largest cost of an item."""
        return float(self.sizes[..., -1].max(initial=0.0))

    def fewest(self, caps: Sequence[Sizes]) -> list[list[Batch]]:
        """Packs each rank's items into few micro-batches: each into the first one with room."""
        count = 2
        while True:
            found = [own for own in self.packed(caps, count, cheapest=False) if own is not None]
            if len(found) == len(caps):
                return found
            count *= 2
