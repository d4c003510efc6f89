import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftmega.backends.megatron.forward import Packing, pack, packed_length

HERE = torch.device("cpu")
Masks = st.integers(0, 6).flatmap(
    lambda rows: st.lists(
        st.lists(st.booleans(), min_size=9, max_size=9), min_size=rows, max_size=rows
    )
)


def mask_of(rows: list[list[bool]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool).reshape(len(rows), 9)


def put_all(parts: list[Packing], values: list[torch.Tensor]) -> torch.Tensor:
    """What all context-parallel processes put back together."""
    return sum(part.put(value) for part, value in zip(parts, values, strict=True))


@given(Masks, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_every_token_is_taken_once_and_comes_back_to_its_place(
    rows: list[list[bool]], tensor: int, context: int
) -> None:
    mask = mask_of(rows)
    grid = torch.arange(1.0, mask.numel() + 1).reshape(mask.shape)
    parts = [
        pack(mask, tensor_multiple=tensor, context=context, context_rank=rank, where=HERE)
        for rank in range(context)
    ]
    taken = [part.take(grid) for part in parts]
    assert len({len(x) for x in taken}) == 1, "processes of one row have equally many tokens"
    assert len(taken[0]) % tensor == 0
    slots = packed_length(mask.sum(1).tolist(), tensor_multiple=tensor, context=context)
    assert len(taken[0]) * context == slots, "what padding is counted by"
    assert torch.equal(put_all(parts, taken), grid * mask)
    rank_in_row = (mask.cumsum(1) - 1) * mask
    assert torch.equal(put_all(parts, [part.positions[0] for part in parts]), rank_in_row)


@given(Masks, st.sampled_from([1, 2, 4]))
def test_without_context_parallelism_nothing_is_padded_but_to_the_multiple(
    rows: list[list[bool]], tensor: int
) -> None:
    mask = mask_of(rows)
    packing = pack(mask, tensor_multiple=tensor, where=HERE)
    tokens = int(mask.sum())
    assert len(packing.slots) - tokens < (tensor if tokens else tensor + 1)
    counts = [n for n in mask.sum(1).tolist() if n]
    assert packing.sequence.cu_seqlens_q.diff().tolist()[: len(counts)] == counts


def test_two_processes_share_a_row_in_zig_zag_chunks() -> None:
    """12 tokens in chunks of 3: the first process has chunks 0 and 3, the second 1 and 2.

    A row of 3 is filled up to 4.
    """
    mask = torch.arange(12) < torch.tensor([12, 3])[:, None]
    first, second = (pack(mask, context=2, context_rank=rank, where=HERE) for rank in (0, 1))
    assert first.positions[0].tolist() == [0, 1, 2, 9, 10, 11, 0, 3]
    assert second.positions[0].tolist() == [3, 4, 5, 6, 7, 8, 1, 2]
    assert (
        first.sequence.cu_seqlens_q.tolist() == second.sequence.cu_seqlens_q.tolist() == [0, 12, 16]
    )


def test_one_number_a_row_reaches_all_its_tokens_and_filler_gets_1() -> None:
    mask = torch.tensor([[True, True], [False, True]])
    packing = pack(mask, tensor_multiple=4, where=HERE)
    assert packing.take(torch.tensor([0.5, 0.7])).tolist() == pytest.approx([0.5, 0.5, 0.7, 1.0])


def test_gradients_flow_back_to_the_packed_tokens_only_from_real_columns() -> None:
    packing = pack(
        torch.tensor([[True, True], [False, False], [True, False]]), tensor_multiple=4, where=HERE
    )
    values = torch.ones(4, requires_grad=True)
    packing.put(values).sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 0]  # the last one is filler


def test_rows_padded_to_one_length_are_equally_long_stretches() -> None:
    mask = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    packing = pack(mask, row_length=5, where=HERE)
    assert packing.sequence.cu_seqlens_q.tolist() == [0, 5, 10, 15]
    assert torch.equal(packing.put(packing.take(torch.ones(3, 5))), mask.float())


def test_padding_to_less_than_there_is_is_refused() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="5 tokens; it can't be padded to 4"):
        pack(mask, row_length=4, where=HERE)
    with pytest.raises(ValueError, match="10 packed tokens can't be padded to 8"):
        pack(mask, total_length=8, where=HERE)
