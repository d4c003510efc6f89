"""Rows as a decoder is fed them."""

import pytest
import torch

from rftmega.backends.fsdp.decoder_inputs import feed
from rftmega.backends.fsdp.packed_attention import EDGES, rows_by_length

CPU = torch.device("cpu")


def test_packed_rows_lie_end_to_end_without_their_last_tokens() -> None:
    tokens = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0], [9, 10, 11, 12]])
    fed = feed(tokens, torch.tensor([3, 1, 4]), packed=True, where=CPU)
    assert fed.arguments["input_ids"].tolist() == [[5, 6, 9, 10, 11]]
    assert fed.arguments["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert fed.arguments[EDGES].edges == (0, 2, 5)
    assert fed.targets.tolist() == [6, 7, 10, 11, 12]
    assert fed.slots.tolist() == [0, 1, 6, 7, 8]
    assert rows_by_length([0, 2, 5, 7]) == [([0, 5], 2), ([2], 3)]


def test_padded_rows_keep_their_places() -> None:
    tokens = torch.tensor([[5, 6, 7, 0, 0], [9, 10, 11, 12, 0]])
    fed = feed(tokens, torch.tensor([3, 4]), packed=False, where=CPU)
    assert fed.arguments["input_ids"].tolist() == [[5, 6, 0], [9, 10, 11]]
    assert fed.places.tolist() == [0, 1, 3, 4, 5]
    assert fed.slots.tolist() == [0, 1, 4, 5, 6]


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_without_targets_feeds_one_token_that_counts_nowhere(packed: bool) -> None:
    for lengths in ([], [1, 1]):
        tokens = torch.ones(len(lengths), 5, dtype=torch.int64)
        fed = feed(tokens, torch.tensor(lengths, dtype=torch.int64), packed=packed, where=CPU)
        assert fed.arguments["input_ids"].shape == (1, 1)
        assert fed.slots.tolist() == [len(lengths) * 4]
