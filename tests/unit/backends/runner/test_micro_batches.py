import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rftmega.backends.runner.balanced_partition import karmarkar_karp
from rftmega.backends.runner.flops import row_cost
from rftmega.backends.runner.micro_batches import (
    GRID,
    fewest_micro_batches,
    plan_micro_batches,
)
from rftmega.core.shared_prefixes import SortedRows
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config

EXAMPLES = Path(__file__).parents[4] / "examples"


def with_attention(weight: float) -> Callable[[int], float]:
    return lambda tokens: tokens + weight * tokens**2


LENGTHS = st.lists(st.integers(1, 50), max_size=60)


def grouped(groups: int, samples: int, seed: int = 0) -> tuple[torch.Tensor, SortedRows]:
    """Lengths of mixed rows, `samples` of each of `groups` prompts of 40 tokens; and the rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = 40 + torch.randint(2, 60, (groups * samples,), generator=generator)
    tokens = torch.randint(1000, (groups * samples, 100), generator=generator)
    order = torch.randperm(groups * samples, generator=generator)
    tokens[:, :40] = (order % groups)[:, None]
    return lengths, SortedRows.of(tokens, lengths - 1)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("cap", "attention_cap"), [(300, None), (1000, 40_000), (10_000, None)])
def test_rows_that_share_tokens_are_worked_on_once_under_the_caps(
    ranks: int, cap: int, attention_cap: int | None, group_size: int
) -> None:
    lengths, rows = grouped(8, 8)
    plan = plan_micro_batches(
        lengths.tolist(),
        data_parallel=ranks,
        token_cap=cap,
        attention_cap=attention_cap,
        cost=with_attention(0.01),
        at_least=2,
        group_size=group_size,
        sorted_rows=rows,
    ).rows
    batches = [batch for own in plan for batch in own if batch]
    assert sorted(row for batch in batches for row in batch) == list(range(64))
    assert len({len(own) for own in plan}) == 1
    assert min(len(own) for own in plan) >= 2
    for batch in batches:
        shared = rows.select(batch).shared
        tokens = lengths[batch]
        assert int(tokens.sum() - shared.sum()) <= cap
        squares = int((tokens**2).sum() - (shared**2).sum())
        assert attention_cap is None or squares <= attention_cap
        if group_size == 2:
            assert all(batch[i] + 1 == batch[i + 1] for i in range(0, len(batch), 2))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_with_one_beginning_stay_together_where_the_costs_of_the_ranks_allow_it(
    ranks: int,
) -> None:
    lengths, rows = grouped(16, 8)
    plan = plan_micro_batches(
        lengths.tolist(), data_parallel=ranks, token_cap=10_000, sorted_rows=rows
    ).rows
    computed = [sum(rows.select(batch).computed for batch in own) for own in plan]
    assert sum(computed) < 1.05 * rows.computed, "hardly any beginning is computed twice"
    assert max(computed) < 1.1 * sum(computed) / ranks


def test_a_group_is_cut_where_a_rank_would_have_too_much_to_do() -> None:
    lengths, rows = grouped(2, 32)
    plan = plan_micro_batches(
        lengths.tolist(), data_parallel=8, token_cap=10_000, sorted_rows=rows
    ).rows
    computed = [sum(rows.select(batch).computed for batch in own) for own in plan]
    assert max(computed) < 1.1 * sum(computed) / 8


def test_rows_that_share_nearly_all_tokens_are_bounded_by_their_grid_too() -> None:
    """Per-token values of a micro-batch are padded: 200 rows of 400 tokens, of which 399 are shared."""
    tokens = torch.zeros(200, 400, dtype=torch.int64)
    tokens[:, -1] = torch.arange(200)
    lengths = torch.full((200,), 400)
    cap = 1000
    (plan,) = plan_micro_batches(
        lengths.tolist(),
        data_parallel=1,
        token_cap=cap,
        sorted_rows=SortedRows.of(tokens, lengths),
    ).rows
    assert sorted(row for batch in plan for row in batch) == list(range(200))
    assert max(len(batch) for batch in plan) == GRID * cap // 400


@example([5] * 300, 1, 1, 1, False)
@example([5] * 300, 1, 2, 2, True)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=80),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_rows_padded_to_the_longest_of_a_micro_batch_take_at_most_eight_times_its_tokens(
    lengths: list[int], long_rows: int, ranks: int, group_size: int, lockstep: bool
) -> None:
    """A long row among short ones: losses get them padded."""
    lengths = [*lengths, *[1000] * long_rows]
    lengths = lengths[: len(lengths) // group_size * group_size]
    cap = 2000
    plan = plan_micro_batches(
        lengths, data_parallel=ranks, token_cap=cap, group_size=group_size, lockstep=lockstep
    ).rows
    batches = [batch for own in plan for batch in own]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max((lengths[row] for row in batch), default=0) <= GRID * cap


@given(
    LENGTHS,
    st.integers(1, 8),
    st.integers(50, 200),
    st.sampled_from([None, 2500, 6000]),
    st.sampled_from([1, 2, 4]),
)
def test_every_row_is_worked_on_once_under_the_caps_in_equally_many_micro_batches(
    lengths: list[int], ranks: int, cap: int, attention_cap: int | None, multiple_of: int
) -> None:
    plan = plan_micro_batches(
        lengths,
        data_parallel=ranks,
        token_cap=cap,
        attention_cap=attention_cap,
        cost=with_attention(0.01),
        multiple_of=multiple_of,
    ).rows
    assert sorted(row for batches in plan for batch in batches for row in batch) == list(
        range(len(lengths))
    )
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert len(plan[0]) >= 1
    assert len(plan[0]) % multiple_of == 0
    for batch in (batch for batches in plan for batch in batches):
        assert sum(lengths[row] for row in batch) <= cap
        assert attention_cap is None or sum(lengths[row] ** 2 for row in batch) <= attention_cap


@given(LENGTHS, st.integers(1, 4), st.integers(1, 8), st.integers(50, 3000))
def test_a_rank_with_rows_for_it_gets_at_least_so_many_of_about_the_same_size(
    lengths: list[int], ranks: int, at_least: int, cap: int
) -> None:
    plan = plan_micro_batches(lengths, data_parallel=ranks, token_cap=cap, at_least=at_least).rows
    assert sorted(row for batches in plan for batch in batches for row in batch) == list(
        range(len(lengths))
    )
    for batches in plan:
        tokens = [sum(lengths[row] for row in batch) for batch in batches if batch]
        # else a row is longer than an equal share
        if lengths and sum(tokens) >= at_least * max(lengths):
            assert len(tokens) >= at_least
        assert max(tokens, default=0) <= min(
            cap, max(max(lengths, default=0), sum(tokens) // at_least)
        )


def test_a_pipeline_gets_two_micro_batches_a_stage() -> None:
    assert [fewest_micro_batches(stages) for stages in (1, 2, 4)] == [1, 4, 8]


@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 60),
    st.sampled_from([None, 0, 6000]),
    st.sampled_from([1, 2]),
)
def test_rows_of_a_group_stay_side_by_side_in_their_order(
    lengths: list[int],
    group_size: int,
    ranks: int,
    room: int,
    attention_room: int | None,
    multiple_of: int,
) -> None:
    """Caps as tight as the largest group allows, and with some room."""
    lengths = lengths[: len(lengths) // group_size * group_size]
    starts = range(0, len(lengths), group_size)
    cap = max((sum(lengths[i : i + group_size]) for i in starts), default=1) + room
    squares = max((sum(n * n for n in lengths[i : i + group_size]) for i in starts), default=1)
    attention_cap = None if attention_room is None else squares + attention_room
    plan = plan_micro_batches(
        lengths,
        data_parallel=ranks,
        token_cap=cap,
        attention_cap=attention_cap,
        multiple_of=multiple_of,
        group_size=group_size,
    ).rows
    assert sorted(row for batches in plan for batch in batches for row in batch) == list(
        range(len(lengths))
    )
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert len(plan[0]) % multiple_of == 0
    for batch in (batch for batches in plan for batch in batches):
        assert sum(lengths[row] for row in batch) <= cap
        assert attention_cap is None or sum(lengths[row] ** 2 for row in batch) <= attention_cap
        for i in range(0, len(batch), group_size):
            assert batch[i] % group_size == 0
            assert batch[i : i + group_size] == list(range(batch[i], batch[i] + group_size))


@pytest.mark.parametrize(("lengths", "cap"), [([3, 4, 5], 100), ([3, 4], 6)])
def test_groups_that_are_incomplete_or_over_the_cap_are_refused(
    lengths: list[int], cap: int
) -> None:
    with pytest.raises(AssertionError):
        plan_micro_batches(lengths, data_parallel=1, token_cap=cap, group_size=2)


@given(LENGTHS, st.integers(1, 8))
def test_parts_hold_every_item_once_and_differ_by_at_most_the_largest(
    costs: list[int], parts: int
) -> None:
    found = karmarkar_karp(costs, parts)
    assert sorted(item for items in found for item in items) == list(range(len(costs)))
    sums = [sum(costs[item] for item in items) for items in found]
    assert max(sums) - min(sums) <= max(costs, default=0)


def test_it_finds_the_even_split_of_the_textbook() -> None:
    assert sorted(
        sum(part)
        for part in (
            [[8, 7, 6, 5, 4][i] for i in items] for items in karmarkar_karp([8, 7, 6, 5, 4], 2)
        )
    ) == [14, 16]


def long_tail(rows: int, seed: int = 0) -> list[int]:
    """Lognormal lengths of at most 16,384 tokens, with prompts of 256 tokens."""
    rng = random.Random(seed)
    return [256 + min(16_128, round(rng.lognormvariate(7.6, 1.0))) for _ in range(rows)]


QWEN3_8B = row_cost(describe(read_hf_config(EXAMPLES / "planning" / "qwen3-8b")))


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(("ranks", "rows"), [(4, 16), (64, 16), (1024, 8)])
def test_ranks_wait_at_most_5_percent_for_the_slowest_with_a_long_tail_of_lengths(
    ranks: int, rows: int, lockstep: bool
) -> None:
    """A model of 8 billion parameters, whose attention is a quarter of the longest row's work."""
    lengths = long_tail(ranks * rows)
    plan = plan_micro_batches(
        lengths, data_parallel=ranks, token_cap=32_768, cost=QWEN3_8B, lockstep=lockstep
    )
    costs = [
        [sum(QWEN3_8B(lengths[row]) for row in batch) for batch in batches] for batches in plan.rows
    ]
    mean = sum(map(sum, costs)) / ranks
    slowest = sum(map(max, zip(*costs, strict=True))) if lockstep else max(map(sum, costs))
    assert plan.mean == pytest.approx(mean)
    assert plan.slowest(lockstep) == pytest.approx(slowest)
    assert mean >= 0.95 * slowest


def test_other_ranks_fill_a_micro_batch_beside_a_long_row() -> None:
    """Micro-batches of equal cost within each rank would let the ranks wait longer."""
    plan = plan_micro_batches(
        long_tail(64 * 8), data_parallel=64, token_cap=24_000, cost=QWEN3_8B, lockstep=True
    )
    assert plan.mean >= 0.97 * plan.slowest(lockstep=True)


def test_ranks_whose_rows_share_beginnings_wait_at_most_5_percent_in_every_micro_batch() -> None:
    lengths = torch.tensor(long_tail(64 * 16))
    tokens = torch.arange(len(lengths))[:, None] // 8 * torch.ones(256, dtype=torch.int64)
    tokens[:, 200:] = torch.arange(len(lengths))[:, None]
    beginnings = SortedRows.of(tokens, torch.full_like(lengths, 256))
    rows = replace(beginnings, lengths=lengths[beginnings.order] - 1)
    plan = plan_micro_batches(
        lengths.tolist(),
        data_parallel=64,
        token_cap=32_768,
        cost=QWEN3_8B,
        lockstep=True,
        sorted_rows=rows,
    )
    for batches, costs in zip(plan.rows, plan.costs, strict=True):
        for batch, cost in zip(batches, costs, strict=True):
            shared = rows.select(batch).shared.tolist()
            alone = sum(QWEN3_8B(int(lengths[row])) for row in batch)
            assert cost == pytest.approx(alone - sum(map(QWEN3_8B, shared)))
    assert plan.mean >= 0.95 * plan.slowest(lockstep=True)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("attention_weight", [0.0, 1e-3])
def test_long_tailed_rows_are_balanced_within_3_percent_over_8_ranks(
    seed: int, attention_weight: float
) -> None:
    """512 rows of a log-normal over three orders of magnitude."""
    rng = random.Random(seed)
    lengths = [min(20_000, max(20, round(rng.lognormvariate(6.0, 1.0)))) for _ in range(512)]
    cost = with_attention(attention_weight)
    plan = plan_micro_batches(lengths, data_parallel=8, token_cap=32_768, cost=cost).rows
    costs = [sum(cost(lengths[row]) for batch in batches for row in batch) for batches in plan]
    # no split of rows can do better than its costliest row
    alone = max(map(cost, lengths))
    assert max(costs) <= max(1.03 * sum(costs) / len(costs), alone)


def test_micro_batches_of_a_rank_cost_about_the_same_and_the_costliest_comes_first() -> None:
    plan = plan_micro_batches(
        long_tail(128), data_parallel=2, token_cap=32_768, cost=QWEN3_8B, multiple_of=4
    )
    for costs in plan.costs:
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] >= 0.97 * costs[0]


def test_the_partition_is_the_one_of_the_published_method() -> None:
    """Written down as lists of sums, which are merged the largest with the smallest."""
    rng = random.Random(3)
    costs = [rng.lognormvariate(0, 1) for _ in range(200)]
    solutions = [[0.0] * 4 + [cost] for cost in costs]
    while len(solutions) > 1:
        solutions.sort(key=lambda sums: sums[0] - sums[-1])
        one, other, *solutions = solutions
        solutions.append(sorted(a + b for a, b in zip(one, reversed(other), strict=True)))
    found = sorted(sum(costs[item] for item in items) for items in karmarkar_karp(costs, 5))
    assert found == pytest.approx(solutions[0])


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), max_size=40),
    st.integers(1, 4),
    st.integers(30, 90),
)
def test_no_micro_batch_has_more_patches_than_the_cap(
    rows: list[tuple[int, int]], ranks: int, patch_cap: int
) -> None:
    lengths, patches = [n for n, _ in rows], [p for _, p in rows]
    plan = plan_micro_batches(
        lengths,
        data_parallel=ranks,
        token_cap=100,
        patches=patches,
        patch_cap=patch_cap,
        extra_costs=[2.0 * each for each in patches],
    ).rows
    assert sorted(row for batches in plan for batch in batches for row in batch) == list(
        range(len(rows))
    )
    for batch in (batch for batches in plan for batch in batches):
        assert sum(patches[row] for row in batch) <= patch_cap
        assert sum(lengths[row] for row in batch) <= 100


def test_processes_share_patches_by_their_cost() -> None:
    patches = [40, 0, 0, 0, 0, 40]
    for weight in (0.0, 1.0, 10.0):
        plan = plan_micro_batches(
            [10] * 6,
            data_parallel=2,
            token_cap=100,
            extra_costs=[weight * each for each in patches],
        ).rows
        rows = [sorted(row for batch in batches for row in batch) for batches in plan]
        assert [len(own) for own in rows] == [3, 3]
        shared = sorted(sum(patches[row] for row in own) for own in rows)
        assert weight == 0.0 or shared == [40, 40]
    heavy = plan_micro_batches(
        [10] * 6, data_parallel=2, token_cap=100, extra_costs=[90.0, *[0.0] * 5]
    )
    sizes = sorted(sum(map(len, batches)) for batches in heavy.rows)
    assert sizes == [1, 5], "one image that costs 90 tokens outweighs five rows of text"
