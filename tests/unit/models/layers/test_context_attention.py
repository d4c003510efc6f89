"""Chunks of rows on context-parallel processes."""

import pytest
import torch

from rftmega.models.layers.context_attention import RowChunk


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
