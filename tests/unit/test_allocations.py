"""The tests' own count of bytes, on sequences of changes written by hand."""

import pytest

from tests.allocations import Change, most_held

SEQUENCES = {
    "two at once": ([(0, 10, True), (100, 20, True), (0, -10, True), (200, 15, True)], 35),
    "one is not counted": ([(0, 10, False), (100, 20, True)], 20),
    "freed without a word, and given again": ([(0, 10, True), (0, 20, True), (100, 5, True)], 25),
    "freed without a word, and given again in part": ([(0, 10, True), (8, 20, True)], 20),
    "freed late": (
        [(0, 10, True), (0, 20, True), (0, -10, True), (100, 7, True), (0, -20, True)],
        27,
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_most_that_was_held_is_that_of_memory_that_is_not_free_yet(name: str) -> None:
    told, most = SEQUENCES[name]
    changes = [Change(time, *change) for time, change in enumerate(told)]
    assert most_held(changes) == most
