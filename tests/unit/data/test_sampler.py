import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftmega.config import DataConfig
from rftmega.data import MixedOrder, PromptOrder, order_of
from rftmega.data.sampler import cycle

SHARES = st.lists(st.integers(1, 25), min_size=1, max_size=6)
FEW = settings(max_examples=40)
SIZES = st.lists(st.integers(1, 9), min_size=6, max_size=6)


def mixed(
    shares: list[int], sizes: list[int], seed: int, batch_size: int = 1, position: int = 0
) -> MixedOrder[tuple[int, int]]:
    """Examples (source, row)."""
    sources = [
        [(source, row) for row in range(size)] for source, size in enumerate(sizes[: len(shares)])
    ]
    order = MixedOrder(sources, shares, batch_size=batch_size, seed=seed)
    order.load_state({"position": position})
    return order


def drawn(order: PromptOrder[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return [
        example
        for batch in itertools.islice(order, -(-count // order.batch_size))
        for example in batch
    ][:count]


@given(SHARES)
def test_at_every_prefix_a_source_is_within_one_of_its_share(shares: list[int]) -> None:
    order = cycle(shares)
    assert Counter(order) == dict(enumerate(shares))
    taken = [0] * len(shares)
    for n, source in enumerate(order, start=1):
        taken[source] += 1
        assert all(
            abs(found - Fraction(n * share, sum(shares))) < 1
            for found, share in zip(taken, shares, strict=True)
        )


@FEW
@given(SHARES, SIZES, st.integers(0, 5))
def test_shares_hold_over_many_cycles_and_epochs_and_no_epoch_repeats(
    shares: list[int], sizes: list[int], seed: int
) -> None:
    examples = drawn(mixed(shares, sizes, seed), 3 * sum(shares) + 1)
    taken = [0] * len(shares)
    for n, (source, _) in enumerate(examples, start=1):
        taken[source] += 1
        assert all(
            abs(found - Fraction(n * share, sum(shares))) < 1
            for found, share in zip(taken, shares, strict=True)
        )
    for source, size in enumerate(sizes[: len(shares)]):
        rows = [row for of, row in examples if of == source]
        for start in range(0, len(rows), size):
            epoch = rows[start : start + size]
            assert len(set(epoch)) == len(epoch)


@FEW
@given(SHARES, SIZES, st.integers(0, 5), st.integers(1, 7), st.integers(0, 200))
def test_resumed_anywhere_it_goes_on_alike(
    shares: list[int], sizes: list[int], seed: int, batch_size: int, position: int
) -> None:
    whole = drawn(mixed(shares, sizes, seed), position + 30)
    resumed = mixed(shares, sizes, seed, batch_size, position)
    assert drawn(resumed, 30) == whole[position:]
    assert resumed.position == position + math.ceil(30 / batch_size) * batch_size


def test_a_position_far_away_is_found_without_what_came_before() -> None:
    """10^15 examples: by replaying it would never end."""
    order = mixed([3, 1], [5, 7, 0, 0, 0, 0], seed=1, position=10**15)
    assert Counter(source for source, _ in drawn(order, 400)) == {0: 300, 1: 100}


def test_sources_of_one_size_have_orders_of_their_own_and_so_have_epochs_and_seeds() -> None:
    size = [20, 20, 0, 0, 0, 0]
    both = drawn(mixed([1, 1], size, seed=1), 80)
    first, second = ([row for source, row in both if source == wanted] for wanted in (0, 1))
    assert first != second
    assert first[:20] != first[20:]
    assert drawn(mixed([1, 1], size, seed=2), 80) != both


def test_one_source_is_read_as_before() -> None:
    """The order of a run from before there were several, written down then."""
    order = order_of(DataConfig(train="a"), lambda source: list(range(10)), batch_size=10, seed=3)
    assert next(iter(order)) == [5, 4, 3, 2, 0, 7, 9, 1, 6, 8]


def test_a_config_of_several_sources_mixes_them_by_weight() -> None:
    data = DataConfig(sources={"a": 0.75, "b": 0.25})
    batch = next(iter(order_of(data, lambda source: [source] * 3, batch_size=8, seed=0)))
    assert Counter(batch) == {"a": 6, "b": 2}


@pytest.mark.parametrize("shares", [[1], [1, 1], [3, 1], [1, 2, 1]])
def test_a_cycle_of_small_shares_is_the_even_one(shares: list[int]) -> None:
    assert (
        cycle(shares)
        == {(1,): [0], (1, 1): [0, 1], (3, 1): [0, 0, 0, 1], (1, 2, 1): [1, 0, 1, 2]}[tuple(shares)]
    )
