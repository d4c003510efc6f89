"""Boxes against sets of elements, which know nothing of boxes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rftmega.core.shards import Box, disjoint, intersection, remaining, volume, whole, within

EDGE = st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda edge: (edge[0], sum(edge)))
BOX = st.tuples(EDGE, EDGE)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


@given(one=BOX, other=BOX)
def test_what_two_boxes_share_is_what_their_elements_share(one: Box, other: Box) -> None:
    common = intersection(one, other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)


@given(box=BOX, taken=st.lists(BOX, max_size=4))
def test_what_remains_of_a_box_is_each_element_once(box: Box, taken: list[Box]) -> None:
    left = remaining(box, taken)
    found = [element for each in left for element in elements(each)]
    assert sorted(found) == sorted(elements(box).difference(*map(elements, taken)))


@given(boxes=st.lists(BOX, max_size=5))
def test_boxes_that_overlap_become_boxes_that_do_not(boxes: list[Box]) -> None:
    found = [element for each in disjoint(boxes) for element in elements(each)]
    assert sorted(found) == sorted(set().union(*map(elements, boxes)))


def test_neighbours_become_one_box() -> None:
    quarters = [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6))]
    assert disjoint(quarters) == [whole((4, 6))]


def test_a_box_within_another_begins_where_that_one_does() -> None:
    assert within(((3, 5), (2, 4)), ((2, 8), (2, 4))) == ((1, 3), (0, 2))
    assert volume(((3, 5), (2, 4))) == 4
