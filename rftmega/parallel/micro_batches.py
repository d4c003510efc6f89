"""Which rows are worked on together: a pure function of their lengths."""

from collections.abc import Sequence


def plan_micro_batches(lengths: Sequence[int], *, data_parallel: int, token_cap: int) -> list[list[list[int]]]:
    """Rows -> [rank][micro-batch] -> row indices. Every rank gets the same number of micro-batches; some may be empty.

    Rows go, longest first, to the data-parallel rank with the fewest tokens, then into its micro-batches by first fit
    under `token_cap` tokens. Raises AssertionError for a row over the cap (the config check refuses it before).
    """
    assert max(lengths, default=0) <= token_cap, (max(lengths), token_cap)
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    rows_of: list[list[int]] = [[] for _ in range(data_parallel)]
    tokens_of = [0] * data_parallel
    for row in longest_first:
        rank = tokens_of.index(min(tokens_of))
        rows_of[rank].append(row)
        tokens_of[rank] += lengths[row]
    plan = [_first_fit(rows, lengths, token_cap) for rows in rows_of]
    count = max(1, *(len(batches) for batches in plan))
    return [batches + [[] for _ in range(count - len(batches))] for batches in plan]


def _first_fit(rows: Sequence[int], lengths: Sequence[int], token_cap: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        for i, free in enumerate(room):
            if lengths[row] <= free:
                batches[i].append(row)
                room[i] -= lengths[row]
                break
        else:
            batches.append([row])
            room.append(token_cap - lengths[row])
    return batches
