"""Boxes are read in their order: element by element the range that they stand for."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rftmega.converters.shard_boxes import boxes_of


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_range_and_few(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    boxes = list(boxes_of(shape, begin, end))
    found: list[int] = []
    for offset, size in boxes:
        part = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
        assert part.shape == torch.Size(size)
        found += part.reshape(-1).tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
