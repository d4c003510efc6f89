from hypothesis import given
from hypothesis import strategies as st

from rftmega.parallel.micro_batches import plan_micro_batches


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 8), st.integers(50, 200))
def test_every_row_is_worked_on_once_under_the_cap_in_equally_many_micro_batches(
    lengths: list[int], ranks: int, cap: int
) -> None:
    plan = plan_micro_batches(lengths, data_parallel=ranks, token_cap=cap)
    assert sorted(row for batches in plan for batch in batches for row in batch) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert len(plan[0]) >= 1
    assert all(sum(lengths[row] for row in batch) <= cap for batches in plan for batch in batches)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_differ_by_at_most_one_row(lengths: list[int], ranks: int) -> None:
    plan = plan_micro_batches(lengths, data_parallel=ranks, token_cap=10_000)
    tokens = [sum(lengths[row] for batch in batches for row in batch) for batches in plan]
    assert max(tokens) - min(tokens) <= max(lengths)
