"""Assigns rows to micro-batches, as a pure function of the rows' lengths."""

import heapq
from collections.abc import Sequence


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
    losses over pairs of rows. Raises AssertionError for a group over a cap (the config check
    refuses it before), and for an incomplete last group.
    """
    assert len(lengths) % group_size == 0, (len(lengths), group_size)
    groups = [
        list(range(first, first + group_size)) for first in range(0, len(lengths), group_size)
    ]
    tokens = [sum(lengths[row] for row in rows) for rows in groups]
    squares = [sum(lengths[row] ** 2 for row in rows) for rows in groups]
    seen = [0] * len(groups)
    if patches is not None:
        seen = [sum(patches[row] for row in rows) for rows in groups]
    longest, largest = max(tokens, default=0), max(squares, default=0)
    assert longest <= token_cap, (longest, token_cap)
    assert attention_cap is None or largest <= attention_cap, (largest, attention_cap)
    assert patch_cap is None or max(seen, default=0) <= patch_cap, (max(seen), patch_cap)
    weighed = zip(tokens, squares, seen, strict=True)
    costs = [n + attention_weight * square + patch_weight * own for n, square, own in weighed]
    caps = [attention_cap, patch_cap]
    found = []
    for items in karmarkar_karp(costs, data_parallel):
        share = sum(tokens[item] for item in items) // at_least
        found.append(
            _first_fit(items, [tokens, squares, seen], [min(token_cap, max(share, longest)), *caps])
        )
    plan = [
        [[row for group in batch for row in groups[group]] for batch in batches]
        for batches in found
    ]
    count = max(1, *(len(batches) for batches in plan))
    count = -(-count // multiple_of) * multiple_of
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


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


def _first_fit(
    items: Sequence[int], sizes: Sequence[Sequence[int]], caps: Sequence[int | None]
) -> list[list[int]]:
    """Assigns items to micro-batches by first fit: the longest item first, each to the first
    micro-batch that stays within the caps.
    `sizes[i][item]` is bounded by `caps[i]`; a cap of None is no bound.
    """
    batches: list[list[int]] = []
    held: list[list[int]] = []  # sums of each size
    for item in sorted(items, key=lambda item: (-sizes[0][item], item)):
        own = [size[item] for size in sizes]
        for batch, sums in zip(batches, held, strict=True):
            together = [some + more for some, more in zip(sums, own, strict=True)]
            if all(cap is None or size <= cap for size, cap in zip(together, caps, strict=True)):
                batch.append(item)
                sums[:] = together
                break
        else:
            batches.append([item])
            held.append(own)
    return batches
