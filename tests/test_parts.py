"""Dividing the exhaustive tests into parts."""

import random

import pytest

from tests.parts import chosen_part, parts_of


def test_each_file_is_in_one_part_whatever_the_order_of_the_files() -> None:
    numbers = random.Random(3)
    seconds = {f"tests/test_{n}.py": numbers.uniform(0, 300) for n in range(60)}
    parts = parts_of(seconds, 4)
    assert sorted(file for part in parts for file in part) == sorted(seconds)
    shuffled = dict(numbers.sample(list(seconds.items()), len(seconds)))
    assert parts_of(shuffled, 4) == parts, "several workers must choose alike"


def test_parts_take_about_the_same_time() -> None:
    seconds = {f"tests/test_{n}.py": float(n) for n in range(40)}
    totals = [sum(seconds[file] for file in part) for part in parts_of(seconds, 3)]
    assert max(totals) - min(totals) <= 2.0


def test_one_part_is_everything() -> None:
    assert parts_of({"a": 1.0, "b": 2.0}, 1) == [{"a", "b"}]


@pytest.mark.parametrize("given", ["0/3", "4/3", "2", "a/b", "-1/2", "1/0", ""])
def test_what_is_no_part_is_refused(given: str) -> None:
    assert chosen_part("3/3") == (3, 3)
    with pytest.raises(ValueError, match="is no part"):
        chosen_part(given)
