"""Divides rows that share beginnings, and keeps those that share many tokens together."""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from rftmega.backends.runner.balanced_partition import karmarkar_karp
from rftmega.backends.runner.micro_batch_packing import ADDED, Batch, Sizes
from rftmega.core.shared_prefixes import SortedRows

RUNS_PER_RANK = (1, 1.5, 2, 3, 4, 8)  # that are tried


class NeighbouringRows:
    """NeighbouringRows holds rows in an order in which those that begin alike are neighbours."""

    def __init__(
        self,
        rows: Sequence[int],
        sorted_rows: SortedRows,
        sizes: Callable[[Sequence[int], Sequence[int]], Sizes],
    ):
        """Takes row indices, and `sorted_rows` with the same rows in the same order. `sizes` gives
        the sizes of rows, given the numbers of tokens that they share.
        """
        self.rows, self._sizes = list(rows), sizes
        self.sorted_rows = replace(sorted_rows, order=torch.arange(len(self.rows)))
        common = sorted_rows.common.tolist()
        own = [sizes([row], [shared]) for row, shared in zip(self.rows, common, strict=True)]
        # of all rows before each place, if every common token is computed once
        self._before = {
            name: [0, *accumulate(getattr(each, name) for each in own)] for name in ADDED
        }
        # cost of the tokens that each row shares with the one before it
        self._saved = [
            sizes([row], ()).cost - each.cost for row, each in zip(self.rows, own, strict=True)
        ]
        self._places = {row: place for place, row in enumerate(self.rows)}

    def select(self, rows: Sequence[int]) -> "NeighbouringRows":
        """Returns some of the rows alone; `rows` are in this order."""
        places = [self._places[row] for row in rows]
        return NeighbouringRows(rows, self.sorted_rows.select(places), self._sizes)

    @property
    def tokens(self) -> float:
        """Returns the number of tokens, if every common token is computed once."""
        return self._before["tokens"][-1]

    def sizes(self, first: int, end: int) -> Sizes:
        """Returns the sizes of the rows at the places `first` to `end`, computed together."""
        shared = self.sorted_rows.run(first, end).shared.tolist() if end - first > 1 else ()
        return self._sizes(self.rows[first:end], shared)

    def computed(self, batches: Sequence[Batch], caps: Sizes) -> list[Batch] | None:
        """Returns micro-batches of these rows with the costs of computing each one's rows together;
        None if one is over the caps.
        """
        found = []
        for batch in batches:
            places = [self._places[row] for row in batch.rows]
            sizes = self._sizes(batch.rows, self.sorted_rows.select(places).shared.tolist())
            if not sizes.fit(caps):
                return None
            found.append(batch._replace(cost=sizes.cost))
        return found

    def cost(self, first: int, end: int) -> float:
        """Returns about the cost of these rows: as if every common token was computed once."""
        before = self._before["cost"]
        return before[end] - before[first] + (self._saved[first] if first < end else 0.0)

    def cut(self, number: int) -> list[tuple[int, int]]:
        """Cuts the rows into `number` runs of neighbours, or fewer if all runs are single rows.
        Returns the first and the last place of each run; the last one is excluded.

        The costliest run is cut first, between the two neighbours that share the fewest tokens. Of
        several such positions, the one nearest to the middle of the run is taken.
        """
        common = self.sorted_rows.common.tolist()
        heap = [(-self.cost(0, len(common)), 0, len(common))] if common else []
        while heap and len(heap) < number and heap[0][2] - heap[0][1] > 1:
            _, first, end = heapq.heappop(heap)
            cut = min(
                range(first + 1, end), key=lambda at: (common[at], abs(2 * at - first - end), at)
            )
            for a, b in ((first, cut), (cut, end)):
                heapq.heappush(heap, (-self.cost(a, b) if b - a > 1 else 0.0, a, b))
        return sorted((first, end) for _, first, end in heap)

    def divided(self, parts: int) -> "list[NeighbouringRows]":
        """Divides the rows over `parts` ranks with nearly equal costs.

        The rows are cut into runs, which stay together. Several numbers of runs are tried. The one
        with the least cost of the most loaded rank is taken, and of equal ones the smallest, since
        few runs share most tokens.
        """
        if parts == 1:
            return [self]
        found: dict[float, tuple[list[tuple[int, int]], list[list[int]]]] = {}
        for number in RUNS_PER_RANK:
            runs = self.cut(round(number * parts))
            costs = [self.cost(*run) for run in runs]
            ranks = karmarkar_karp(costs, parts)
            highest = max(sum(costs[item] for item in items) for items in ranks)
            found.setdefault(highest, (runs, ranks))
        runs, ranks = found[min(found)]
        return [
            self.select([row for item in items for row in self.rows[slice(*runs[item])]])
            for items in ranks
        ]

    def fewest(self, caps: Sizes) -> list[Batch]:
        """Packs the rows in their order into micro-batches, each as full as the caps allow."""
        found: list[Batch] = []
        first = 0
        while first < len(self.rows):
            low, middle = first + 1, self._bound(first, caps)  # a row alone fits
            high = middle
            while low < high:
                if self.sizes(first, middle).fit(caps):
                    low = middle
                else:
                    high = middle - 1
                middle = (low + high + 1) // 2
            found.append(Batch(self.rows[first:low], self.sizes(first, low).cost))
            first = low
        return found

    def _bound(self, first: int, caps: Sizes) -> int:
        """Returns an upper bound on the place before which rows from `first` on fit the caps."""
        found = len(self.rows)
        for name, before in self._before.items():
            # the first row counts as nothing, since it may share its tokens here
            found = min(found, bisect_right(before, before[first + 1] + getattr(caps, name)) - 1)
        return max(found, first + 1)
