"""Assigns rows to micro-batches, as a pure function of the rows' lengths."""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rftmega.core.shared_prefixes import SortedRows

UNITS = (1, 1.5, 2, 3, 4, 8)  # runs of rows per rank that are tried, where rows share tokens
GRID = 8  # padded tokens of rows that share some, over the cap on computed ones: losses are padded


def fewest_micro_batches(pipeline: int) -> int:
    """Returns the minimum number of micro-batches for `pipeline` stages: two per stage, so that the
    pipeline bubble is at most a third of the time; 1 without stages.
    """
    return 2 * pipeline if pipeline > 1 else 1


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    data_parallel: int,
    token_cap: int,
    attention_cap: int | None = None,
    attention_weight: float = 0.0,
    multiple_of: int = 1,
    at_least: int = 1,
    group_size: int = 1,
    patches: Sequence[int] | None = None,
    patch_cap: int | None = None,
    patch_weight: float = 0.0,
    sorted_rows: SortedRows | None = None,
) -> list[list[list[int]]]:
    """Assigns rows (token sequences of the given `lengths`) to micro-batches of `data_parallel`
    ranks: returns [rank][micro-batch] -> row indices. Every rank gets the same number of
    micro-batches; some may be empty.

    A row of n tokens with p image `patches` costs n + attention_weight * n^2 + patch_weight * p
    (the share of attention in a layer's work grows with the row). Karmarkar-Karp differencing gives
    the ranks nearly equal cost; a micro-batch holds at most `token_cap` tokens, `attention_cap`
    squared tokens and `patch_cap` patches. The number of micro-batches is a multiple of
    `multiple_of`, as the interleaved pipeline schedule requires, and at least `at_least` if the
    rank has enough rows. Each group of `group_size` consecutive rows stays together, in order, for
    losses over pairs of rows. With `sorted_rows` the common beginnings of rows count once in a
    micro-batch, and rows that share them are kept together where the ranks' costs allow it. Raises
    AssertionError for a group over a cap (the config check refuses it before), and for an
    incomplete last group.
    """
    assert len(lengths) % group_size == 0, (len(lengths), group_size)
    groups = [
        list(range(first, first + group_size)) for first in range(0, len(lengths), group_size)
    ]

    def sizes(rows: Sequence[int]) -> _Sizes:
        own = [lengths[row] for row in rows]
        shared = []
        if sorted_rows is not None and len(rows) > 1:
            shared = sorted_rows.select(rows).shared.tolist()
        return _Sizes(
            sum(own) - sum(shared),
            sum(n * n for n in own) - sum(n * n for n in shared),
            0 if patches is None else sum(patches[row] for row in rows),
            len(own) * max(own, default=0),
        )

    def cost(of: _Sizes) -> float:
        return of.tokens + attention_weight * of.squares + patch_weight * of.patches

    held = [sizes(rows) for rows in groups]
    most = _Sizes(*(max(size, default=0) for size in zip(*held, strict=True))) if held else _NONE
    caps = (token_cap, attention_cap, patch_cap, None)
    for size, cap in zip(most, caps, strict=True):
        assert cap is None or size <= cap, (size, cap)
    if sorted_rows is not None and group_size == 1:
        plan = []
        for rows in _divided(sorted_rows, data_parallel, lambda rows: cost(sizes(rows))):
            share = sizes(rows).tokens // at_least
            cap = min(token_cap, max(share, most.tokens))
            plan.append(_in_order(rows, sizes, (cap, *caps[1:3], GRID * token_cap)))
    else:
        plan = []
        for items in karmarkar_karp([cost(size) for size in held], data_parallel):
            share = sum(held[item].tokens for item in items) // at_least
            fitted = _first_fit(items, held, (min(token_cap, max(share, most.tokens)), *caps[1:]))
            plan.append([[row for item in batch for row in groups[item]] for batch in fitted])
    count = max(1, *(len(batches) for batches in plan))
    count = -(-count // multiple_of) * multiple_of
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


class _Sizes(NamedTuple):
    """_Sizes holds the sizes of rows for which a micro-batch has a limit (`_Caps`)."""

    tokens: int
    squares: int  # of the rows' lengths
    patches: int
    grid: int  # rows x longest; of several groups only their sum

    def fit(self, caps: "_Caps") -> bool:
        return all(cap is None or size <= cap for size, cap in zip(self, caps, strict=True))


_Caps = Sequence[int | None]  # of _Sizes; None: no bound
_NONE = _Sizes(0, 0, 0, 0)


def _divided(
    rows: SortedRows, parts: int, cost: Callable[[Sequence[int]], float]
) -> list[list[int]]:
    """Divides rows that share beginnings over `parts` ranks. Returns the row indices of each rank.

    Sorted rows are cut into runs of neighbours, which stay together. Several numbers of runs are
    tried. The one with the least cost of the most loaded rank is taken, and of equal ones the
    smallest, since few runs share most tokens.
    """
    if parts == 1:
        return [rows.order.tolist()]
    found: dict[float, list[list[int]]] = {}
    for number in UNITS:
        runs = _runs(rows, round(number * parts))
        costs = [cost(run) for run in runs]
        ranks = karmarkar_karp(costs, parts)
        highest = max(sum(costs[item] for item in items) for items in ranks)
        divided = [[row for item in items for row in runs[item]] for items in ranks]
        found.setdefault(highest, divided)
    return found[min(found)]


def _runs(rows: SortedRows, number: int) -> list[list[int]]:
    """Cuts sorted rows into `number` runs of neighbours, or fewer if all runs are single rows.

    The run with the most tokens is cut first, between the two neighbours that share the fewest
    tokens. Of several such positions, the one nearest to the middle of the run is taken.
    """
    order, common, lengths = (x.tolist() for x in (rows.order, rows.common, rows.lengths))
    heap = [(-sum(lengths), 0, len(order))] if order else []
    while heap and len(heap) < number and heap[0][2] - heap[0][1] > 1:
        _, first, end = heapq.heappop(heap)
        cut = min(
            range(first + 1, end), key=lambda row: (common[row], abs(2 * row - first - end), row)
        )
        for a, b in ((first, cut), (cut, end)):
            tokens = sum(lengths[a:b]) - sum(common[a + 1 : b])
            heapq.heappush(heap, (-tokens if b - a > 1 else 0, a, b))
    return [order[first:end] for _, first, end in sorted(heap, key=lambda run: run[1])]


def _in_order(
    rows: Sequence[int], sizes: Callable[[Sequence[int]], _Sizes], caps: _Caps
) -> list[list[int]]:
    """Fills micro-batches with rows in their order, each as far as the caps allow."""
    batches: list[list[int]] = []
    rest = list(rows)
    while rest:
        low, high = 1, len(rest)  # a row alone fits
        while low < high:
            middle = (low + high + 1) // 2
            if sizes(rest[:middle]).fit(caps):
                low = middle
            else:
                high = middle - 1
        batches.append(rest[:low])
        rest = rest[low:]
    return batches


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Partitions items into `parts` lists of item indices with nearly equal sums of costs; the
    indices are in ascending order.
    Largest differencing (Karmarkar and Karp, 1982): the two partial solutions with the largest
    differences are merged, the heaviest list of one with the lightest of the other, until one
    solution remains. Ties are broken by item index, so that every process finds the same partition.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, cost in enumerate(costs):
        solution: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(parts - 1)] + [
            (cost, [item])
        ]
        heapq.heappush(heap, (-cost, item, solution))
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: (part[0], part[1]))
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], first, merged))
    parts_found = [items for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]
    return sorted((sorted(items) for items in parts_found), key=lambda items: items or [len(costs)])


def _first_fit(items: Sequence[int], sizes: Sequence[_Sizes], caps: _Caps) -> list[list[int]]:
    """Assigns items to micro-batches by first fit: the longest item first, each to the first
    micro-batch that stays within the caps.
    """
    batches: list[list[int]] = []
    held: list[_Sizes] = []
    for item in sorted(items, key=lambda item: (-sizes[item].tokens, item)):
        own = sizes[item]
        for number, batch in enumerate(batches):
            together = _Sizes(*(some + more for some, more in zip(held[number], own, strict=True)))
            if together.fit(caps):
                batch.append(item)
                held[number] = together
                break
        else:
            batches.append([item])
            held.append(own)
    return batches
