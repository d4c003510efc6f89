"""Assigns rows to micro-batches, as a pure function of the rows' lengths."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from rftmega.backends.runner.balanced_partition import karmarkar_karp
from rftmega.backends.runner.micro_batch_packing import Batch, Items, Sizes
from rftmega.backends.runner.neighbouring_rows import NeighbouringRows
from rftmega.core.shared_prefixes import SortedRows

# padded tokens of a micro-batch over the cap on its tokens: a loss gets rows padded to the longest
GRID = 8
# limits on a micro-batch's cost that are tried: shares of the way from an equal share to no limit
LIMITS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7)
RUNS_PER_MICRO_BATCH = (4, 12)  # that are tried, where rows share tokens
CLOSE = 1.01  # planned time over the least possible one at which no other division is tried


def fewest_micro_batches(pipeline: int) -> int:
    """Returns the minimum number of micro-batches for `pipeline` stages: two per stage, so that the
    pipeline bubble is at most a third of the time; 1 without stages.
    """
    return 2 * pipeline if pipeline > 1 else 1


class MicroBatchPlan(NamedTuple):
    """MicroBatchPlan assigns rows to micro-batches. Every rank has the same number of micro-batches;
    some may be empty.
    """

    rows: list[list[list[int]]]  # [rank][micro-batch] -> row indices
    costs: list[list[float]]  # [rank][micro-batch], in tokens

    def slowest(self, lockstep: bool) -> float:
        """Returns the cost of the slowest path. `lockstep`: the ranks wait for each other in every
        micro-batch, as in the collectives of FSDP2 and of expert parallelism; else only at the end.
        """
        if lockstep:
            return sum(map(max, zip(*self.costs, strict=True)))
        return max(map(sum, self.costs))

    @property
    def mean(self) -> float:
        """Returns the mean cost of a rank."""
        return sum(map(sum, self.costs)) / len(self.costs)


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    data_parallel: int,
    token_cap: int,
    attention_cap: int | None = None,
    cost: Callable[[int], float] = float,
    extra_costs: Sequence[float] | None = None,
    lockstep: bool = False,
    multiple_of: int = 1,
    at_least: int = 1,
    group_size: int = 1,
    patches: Sequence[int] | None = None,
    patch_cap: int | None = None,
    sorted_rows: SortedRows | None = None,
) -> MicroBatchPlan:
    """Assigns rows (token sequences of the given `lengths`) to micro-batches of `data_parallel`
    ranks.

    A row of n tokens costs cost(n) + `extra_costs`[row], such as for its images. Karmarkar-Karp
    differencing gives the ranks nearly equal cost. A micro-batch holds at most `token_cap` tokens,
    `attention_cap` squared tokens and `patch_cap` patches, and padded to its longest row at most
    GRID times `token_cap` tokens (or one group). Each rank's micro-batches have nearly
    equal cost, or where that makes ranks that meet (`MicroBatchPlan.slowest`) wait less, some are
    fuller; the costliest come first. Their number is as low as the caps allow, a multiple of
    `multiple_of`, as the interleaved pipeline schedule requires, and at least `at_least` if the
    rank has enough rows. Each group of `group_size` consecutive rows stays together, in order, for
    losses over pairs of rows. With `sorted_rows` the common beginnings of rows count once in a
    micro-batch, and rows that share them are kept together where the ranks' costs allow it. Raises
    AssertionError for a group over a cap (the config check refuses it before), and for an
    incomplete last group.
    """
    assert len(lengths) % group_size == 0, (len(lengths), group_size)
    extra = extra_costs or [0.0] * len(lengths)
    groups = [
        list(range(first, first + group_size)) for first in range(0, len(lengths), group_size)
    ]

    def sizes(rows: Sequence[int], shared: Sequence[int]) -> Sizes:
        own = [lengths[row] for row in rows]
        return Sizes(
            sum(own) - sum(shared),
            sum(n * n for n in own) - sum(n * n for n in shared),
            0 if patches is None else sum(patches[row] for row in rows),
            len(own) * max(own, default=0),
            sum(map(cost, own)) + sum(extra[row] for row in rows) - sum(map(cost, shared)),
        )

    def shared(rows: Sequence[int]) -> Sequence[int]:
        if sorted_rows is None or len(rows) < 2:
            return ()
        return sorted_rows.select(rows).shared.tolist()

    held = [sizes(rows, shared(rows)) for rows in groups]
    most = Sizes(*map(max, zip(*held, strict=True))) if held else Sizes(0, 0, 0, 0, 0)
    caps = Sizes(
        token_cap,
        math.inf if attention_cap is None else attention_cap,
        math.inf if patch_cap is None else patch_cap,
        max(GRID * token_cap, most.grid),
        math.inf,
    )
    assert most.fit(caps), (most, caps)

    def caps_of(tokens: float) -> Sizes:
        """Returns caps for a rank with so many tokens that give it `at_least` micro-batches."""
        return caps._replace(tokens=min(token_cap, max(tokens // at_least, most.tokens)))

    candidates: Iterator[_Division]
    if sorted_rows is not None and group_size == 1:
        neighbours = NeighbouringRows(sorted_rows.order.tolist(), sorted_rows, sizes)
        ranks = neighbours.divided(data_parallel)
        limits = [caps_of(own.tokens) for own in ranks]
        fewest = [own.fewest(cap) for own, cap in zip(ranks, limits, strict=True)]
        count = _rounded(fewest, multiple_of)
        candidates = chain([fewest], _of_runs(ranks, limits, fewest, count))
    else:
        parts = karmarkar_karp([each.cost for each in held], data_parallel)
        limits = [caps_of(sum(held[item].tokens for item in items)) for items in parts]
        fewest = Items(parts, groups, held, by="tokens").fewest(limits)
        count = _rounded(fewest, multiple_of)
        candidates = _of_items(Items(parts, groups, held, by="cost"), limits, fewest, count)
    return _plan(_best(candidates, fewest, count, lockstep), fewest, count)


# the micro-batches of each rank; None: its rows don't have room
_Division = Sequence[Sequence[Batch] | None]


def _rounded(fewest: Sequence[Sequence[Batch]], multiple_of: int) -> int:
    """Returns the number of micro-batches that all ranks need: a multiple of `multiple_of`."""
    return -(-max(1, *map(len, fewest)) // multiple_of) * multiple_of


def _of_items(
    items: Items, caps: Sequence[Sizes], fewest: Sequence[Sequence[Batch]], count: int
) -> Iterator[_Division]:
    """Yields divisions of each rank's items into `count` micro-batches: of equal costs, and then
    with several limits on their costs. `fewest`: a division by the caps alone.
    """
    yield items.packed(caps, count, cheapest=True)
    costs = [[batch.cost for batch in own] for own in fewest]
    low = max(items.costliest, max(map(sum, costs)) / count)
    high = max(low, *(max(own, default=0.0) for own in costs))
    for share in LIMITS:
        limit = low + share * (high - low)
        yield items.packed([cap._replace(cost=limit) for cap in caps], count, cheapest=False)


def _of_runs(
    ranks: Sequence[NeighbouringRows],
    caps: Sequence[Sizes],
    fewest: Sequence[Sequence[Batch]],
    count: int,
) -> Iterator[_Division]:
    """Yields divisions of each rank's rows into `count` micro-batches: of runs of rows that share
    tokens, which are packed like rows that share none. `fewest`: a division by the caps alone.
    """
    for number in RUNS_PER_MICRO_BATCH:
        rows: list[list[int]] = []
        sizes: list[Sizes] = []
        held = []
        for own in ranks:
            runs = own.cut(number * count)
            held.append(range(len(rows), len(rows) + len(runs)))
            rows += [own.rows[slice(*run)] for run in runs]
            sizes += [own.sizes(*run) for run in runs]
        candidates = _of_items(Items(held, rows, sizes, by="cost"), caps, fewest, count)
        found = _best(candidates, fewest, count, lockstep=True)
        # runs of the same micro-batch may share tokens, too
        yield [
            batches and own.computed(batches, cap)
            for own, batches, cap in zip(ranks, found, caps, strict=True)
        ]


def _best(
    candidates: Iterator[_Division],
    fewest: Sequence[Sequence[Batch]],
    count: int,
    lockstep: bool,
) -> _Division:
    """Returns the first of the candidates or, if the ranks compute in lockstep, the one in which
    they wait least. A rank whose rows don't have room gets its division of `fewest` instead.
    """
    found = next(candidates)
    if not lockstep or count == 1:
        return found
    plan = _plan(found, fewest, count)
    least, slowest = CLOSE * plan.slowest(lockstep=False), plan.slowest(lockstep)
    for division in candidates:
        if slowest <= least:
            break
        planned = _plan(division, fewest, count).slowest(lockstep)
        if planned < slowest:
            found, slowest = division, planned
    return found


def _plan(division: _Division, fewest: Sequence[Sequence[Batch]], count: int) -> MicroBatchPlan:
    plan = MicroBatchPlan([], [])
    for own, few in zip(division, fewest, strict=True):
        batches = sorted(few if own is None else own, key=lambda batch: (-batch.cost, batch.rows))
        missing = count - len(batches)
        plan.rows.append([batch.rows for batch in batches] + [[] for _ in range(missing)])
        plan.costs.append([batch.cost for batch in batches] + [0.0] * missing)
    return plan
