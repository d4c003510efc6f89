import itertools
import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftmega.checkpoints.state_split import joined, put_together, taken_apart
from rftmega.config import DataConfig
from rftmega.data.examples import load_examples
from rftmega.data.sampler import MixedOrder, PromptOrder, cycle, order_of

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


def handed_out(order: PromptOrder[int], batches: int) -> list[int]:
    return [row for batch in itertools.islice(order, batches) for row in batch]


def saved(order: PromptOrder[int]) -> dict[str, Any]:
    """As a checkpoint gives it back."""
    said, tensors = taken_apart(order.state())
    held = joined(tensors)
    return put_together(json.loads(json.dumps(said)), held.__getitem__)  # type: ignore[no-any-return]


ROWS = list(range(60))
CHANGES = {  # name -> (rows, seed) that a resumed run has
    "nothing": (ROWS, 0),
    "the last row removed": (ROWS[:-1], 0),
    "the first row removed": (ROWS[1:], 0),
    "many rows removed": (ROWS[::2], 0),
    "rows appended": ([*ROWS, 100, 101], 0),
    "rows in another order": (ROWS[::-1], 0),
    "another seed": (ROWS, 1),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("batches", [0, 1, 7, 12, 17])
def test_data_that_changed_are_handed_out_once_an_epoch_all_the_same(
    what: str, batches: int
) -> None:
    """Of 60 rows in batches of 5, after `batches` of them, in the first epoch or the second."""
    rows, seed = CHANGES[what]
    first = PromptOrder(ROWS, batch_size=5, seed=0)
    before = handed_out(first, batches)[batches // 12 * 60 :]
    again = PromptOrder(rows, batch_size=1, seed=seed)
    again.load_state(saved(first))
    left = set(rows) - set(before)
    assert again.position == batches * 5
    rest = handed_out(again, len(left))
    assert len(set(rest)) == len(rest) and set(rest) == left
    if what == "nothing":
        assert rest == handed_out(first, 12 - batches % 12)
    for _ in range(2):  # whole epochs follow
        assert sorted(handed_out(again, len(rows))) == sorted(rows)


def test_a_run_whose_data_changed_goes_on_alike_after_another_resume() -> None:
    first = PromptOrder(ROWS, batch_size=5, seed=0)
    before = handed_out(first, 4)
    second = PromptOrder(ROWS[1:], batch_size=5, seed=1)
    second.load_state(saved(first))
    before += handed_out(second, 3)
    state = saved(second)
    expected = handed_out(second, 20)
    third = PromptOrder(ROWS[1:], batch_size=5, seed=1)
    third.load_state(state)
    assert handed_out(third, 20) == expected
    rest = expected[: 60 - len(before)]
    assert sorted({*before, *rest, 0}) == ROWS and len({*before, *rest}) >= 59


def test_equal_records_are_counted() -> None:
    first = PromptOrder(["a", "b", "a", "c", "a"], batch_size=1, seed=0)
    before = handed_out(first, 3)
    again = PromptOrder(["c", "a", "a", "b", "a"], batch_size=1, seed=5)
    again.load_state(saved(first))
    assert Counter(before + handed_out(again, 2)) == {"a": 3, "b": 1, "c": 1}


def test_sources_whose_weights_or_number_changed_repeat_nothing_in_an_epoch() -> None:
    names = ["a", "b"]
    sources = [[f"a{n}" for n in range(30)], [f"b{n}" for n in range(30)]]
    first = MixedOrder(sources, [2, 1], batch_size=3, seed=0, names=names)
    before = handed_out(first, 5)
    state = saved(first)
    for order in (
        MixedOrder(sources, [1, 4], batch_size=3, seed=0, names=names),
        MixedOrder([sources[1], ["c"] * 9, sources[0]], [2, 1, 2], batch_size=5, seed=3, names=["b", "c", "a"]),
    ):  # fmt: skip
        order.load_state(state)
        rest = handed_out(order, 40)
        for name, size in (("a", 30), ("b", 30)):
            own = [each for each in before + rest if each.startswith(name)]
            assert len(own) > 30, "no whole epoch"
            assert len(set(own[:size])) == size
    assert Counter(each[0] for each in rest[:10]) == {"a": 4, "b": 4, "c": 2}


def test_a_position_of_an_earlier_version_is_gone_on_from() -> None:
    order = PromptOrder(ROWS, batch_size=5, seed=0)
    expected = handed_out(order, 20)
    again = PromptOrder(ROWS, batch_size=5, seed=0)
    again.load_state({"position": 35})
    assert handed_out(again, 13) == expected[35:]


def test_a_record_is_known_wherever_it_stands_and_whatever_becomes_of_it(tmp_path: Path) -> None:
    """Of three files, in two formats, with another template: where is which record?"""
    lines = [{"prompt": f"{n}+1", "label": str(n)} for n in range(4)]
    first, second = tmp_path / "a.jsonl", tmp_path / "b.json"
    first.write_text("\n".join(map(json.dumps, lines)))
    second.write_text(json.dumps([dict(reversed(each.items())) for each in lines[::-1]]))
    one = load_examples(first, lambda record, index: index, too_long="error", noun="rows")
    other = load_examples(second, lambda record, index: str(record), too_long="error", noun="rows")
    assert one.identities == other.identities[::-1] and len(set(one.identities)) == 4


def test_records_that_no_json_can_hold_are_known_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "def rows():\n    own = [1]\n    own.append(own)\n    yield {'prompt': b'x', 'x': own}\n"
        "    yield {'prompt': b'y', 'x': {(1, 2): object}}\n"
    )
    found = load_examples(
        f"{tmp_path}/made.py:rows", lambda record, index: index, too_long="error", noun="rows"
    )
    assert len(set(found.identities)) == 2


def test_the_share_of_the_data_that_was_used_counts_epochs() -> None:
    order = PromptOrder(list("abcdefgh"), batch_size=5, seed=0)
    assert order.epochs == 0
    for _, _ in zip(range(2), order, strict=False):
        pass
    assert order.epochs == 10 / 8
