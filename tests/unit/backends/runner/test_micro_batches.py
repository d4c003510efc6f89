import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftmega.backends.runner.micro_batches import (
    GRID,
    fewest_micro_batches,
    karmarkar_karp,
    plan_micro_batches,
)
from rftmega.core.shared_prefixes import SortedRows

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
        attention_weight=0.01,
        at_least=2,
        group_size=group_size,
        sorted_rows=rows,
    )
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
    )
    computed = [sum(rows.select(batch).computed for batch in own) for own in plan]
    assert sum(computed) < 1.05 * rows.computed, "hardly any beginning is computed twice"
    assert max(computed) < 1.1 * sum(computed) / ranks


def test_a_group_is_cut_where_a_rank_would_have_too_much_to_do() -> None:
    lengths, rows = grouped(2, 32)
    plan = plan_micro_batches(lengths.tolist(), data_parallel=8, token_cap=10_000, sorted_rows=rows)
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
    )
    assert sorted(row for batch in plan for row in batch) == list(range(200))
    assert max(len(batch) for batch in plan) == GRID * cap // 400


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
        attention_weight=0.01,
        multiple_of=multiple_of,
    )
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
    plan = plan_micro_batches(lengths, data_parallel=ranks, token_cap=cap, at_least=at_least)
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
    )
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


def test_a_plan_without_groups_is_the_one_of_before_there_were_any() -> None:
    """Written down then."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(24)]
    plan = plan_micro_batches(
        lengths,
        data_parallel=3,
        token_cap=100,
        attention_cap=4000,
        attention_weight=0.013,
        multiple_of=2,
    )
    assert plan == [
        [[1, 23], [13, 6, 0, 14], [4, 16], []],
        [[22, 11, 18, 3], [5, 2, 7], [8, 20], []],
        [[17, 21, 12], [19, 9, 10], [15], []],
    ]


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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("attention_weight", [0.0, 1e-3])
def test_long_tailed_rows_are_balanced_within_3_percent_over_8_ranks(
    seed: int, attention_weight: float
) -> None:
    """512 rows of a log-normal over three orders of magnitude."""
    rng = random.Random(seed)
    lengths = [min(20_000, max(20, round(rng.lognormvariate(6.0, 1.0)))) for _ in range(512)]
    cap = 32_768
    plan = plan_micro_batches(
        lengths, data_parallel=8, token_cap=cap, attention_weight=attention_weight
    )
    costs = [
        sum(lengths[r] + attention_weight * lengths[r] ** 2 for batch in batches for r in batch)
        for batches in plan
    ]
    # no split of rows can do better than its costliest row
    alone = max(n + attention_weight * n * n for n in lengths)
    assert max(costs) <= max(1.03 * sum(costs) / len(costs), alone)


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
        patch_weight=2.0,
    )
    assert sorted(row for batches in plan for batch in batches for row in batch) == list(
        range(len(rows))
    )
    for batch in (batch for batches in plan for batch in batches):
        assert sum(patches[row] for row in batch) <= patch_cap
        assert sum(lengths[row] for row in batch) <= 100


def test_processes_share_patches_by_their_weight() -> None:
    patches = [40, 0, 0, 0, 0, 40]
    for patch_weight, wanted in ((0.0, 3), (1.0, 3), (10.0, 3)):
        plan = plan_micro_batches(
            [10] * 6, data_parallel=2, token_cap=100, patches=patches, patch_weight=patch_weight
        )
        rows = [sorted(row for batch in batches for row in batch) for batches in plan]
        assert [len(own) for own in rows] == [wanted, wanted]
        shared = sorted(sum(patches[row] for row in own) for own in rows)
        assert patch_weight == 0.0 or shared == [40, 40]
    heavy = plan_micro_batches(
        [10] * 6, data_parallel=2, token_cap=100, patches=[90, 0, 0, 0, 0, 0], patch_weight=1.0
    )
    sizes = sorted(sum(map(len, batches)) for batches in heavy)
    assert sizes == [1, 5], "one image of 90 patches outweighs five rows of words"
