"""Chunks of rows on context-parallel processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.models.layers.context_attention import RowChunk, chunks_of


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_chunk_keeps_the_keys_that_its_window_reaches(window: int | None, rows: int) -> None:
    """4 queries at the end of 12 keys, of rows that begin at token 5 and 40."""
    starts = torch.tensor([5, 40][:rows])[:, None]
    queries = torch.arange(4).expand(rows, 4)
    keys = slice(5, 17) if rows == 1 else starts + torch.arange(12)
    found = RowChunk(queries, keys).within(window)
    tokens = torch.arange(60)[:, None, None]
    for start, own in zip(starts[:, 0].tolist(), found.of_keys(tokens)[:, 0, :, 0], strict=True):
        first = 0 if window is None else max(0, 8 - window + 1)
        assert own.tolist() == list(range(start + first, start + 12))
    assert found.queries is queries


@pytest.mark.parametrize("rows", [1, 2])
def test_keys_within_a_window_are_copied_and_all_others_freed(rows: int) -> None:
    """A view of them would keep the keys of all processes."""
    starts = torch.arange(rows)[:, None] * 64
    chunk = RowChunk(
        torch.arange(4).expand(rows, 4), slice(0, 64) if rows == 1 else starts + torch.arange(64)
    )
    found = chunk.within(3).of_keys(torch.randn(128, 2, 8))
    assert found.untyped_storage().nbytes() == rows * (4 + 3 - 1) * 2 * 8 * 4


@pytest.mark.parametrize(
    ("lengths", "whole"), [([8], [True]), ([8, 8], [True]), ([8, 4], [True, True])]
)
def test_whole_rows_are_known_as_such_on_every_device(
    lengths: list[int], whole: list[bool]
) -> None:
    """Then nothing of them is copied."""
    edges = torch.tensor([0, *lengths]).cumsum(0)
    for device in ("cpu", "meta"):
        packed: Any = SimpleNamespace(edges=edges.tolist(), cu_seqlens_q=edges.to(device))
        found = chunks_of(packed, 0, 1)
        assert [chunk.whole for chunk in found.batches] == whole
        assert {chunk.queries.device.type for chunk in found.batches} == {device}
    packed = SimpleNamespace(edges=[0, 8], cu_seqlens_q=edges)
    assert not any(chunk.whole for chunk in chunks_of(packed, 0, 2).batches)
