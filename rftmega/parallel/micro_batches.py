"""Which rows are worked on together: a pure function of their lengths."""

import heapq
from collections.abc import Sequence


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    data_parallel: int,
    token_cap: int,
    attention_cap: int | None = None,
    attention_weight: float = 0.0,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Rows -> [rank][micro-batch] -> row indices. Every rank gets the same number of micro-batches; some may be empty.

    A row of n tokens costs n + attention_weight * n^2 (the share of attention in a layer's work grows with the row). Ranks
    get equal cost by Karmarkar-Karp differencing; a rank's micro-batches hold at most `token_cap` tokens and `attention_cap`
    squared tokens. Their number is a multiple of `multiple_of`, which the interleaved pipeline schedule asks for.
    Raises AssertionError for a row over a cap (the config check refuses it before).
    """
    longest = max(lengths, default=0)
    assert longest <= token_cap, (longest, token_cap)
    assert attention_cap is None or longest**2 <= attention_cap, (longest**2, attention_cap)
    costs = [n + attention_weight * n * n for n in lengths]
    plan = [_first_fit(rows, lengths, token_cap, attention_cap) for rows in karmarkar_karp(costs, data_parallel)]
    count = max(1, *(len(batches) for batches in plan))
    count = -(-count // multiple_of) * multiple_of
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Items -> `parts` lists of item indices with nearly equal sums, each in ascending order.

    Largest differencing (Karmarkar and Karp, 1982): the two partial solutions that differ most are merged, the heaviest part
    of one with the lightest of the other, until one is left. Ties go by item index, so that every process finds the same.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, cost in enumerate(costs):
        solution: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(parts - 1)] + [(cost, [item])]
        heapq.heappush(heap, (-cost, item, solution))
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: (part[0], part[1]))
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], first, merged))
    parts_found = [items for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]
    return sorted((sorted(items) for items in parts_found), key=lambda items: items or [len(costs)])


def _first_fit(rows: Sequence[int], lengths: Sequence[int], token_cap: int, attention_cap: int | None) -> list[list[int]]:
    """Longest rows first, each into the first micro-batch that has room."""
    batches: list[list[int]] = []
    tokens: list[int] = []
    squares: list[int] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        n = lengths[row]
        for i in range(len(batches)):
            if tokens[i] + n <= token_cap and (attention_cap is None or squares[i] + n * n <= attention_cap):
                break
        else:
            i = len(batches)
            batches.append([])
            tokens.append(0)
            squares.append(0)
        batches[i].append(row)
        tokens[i] += n
        squares[i] += n * n
    return batches
