import torch
from hypothesis import given
from hypothesis import strategies as st

from rftmega.megatron.forward import pack, unpack
from tests.layouts import rows_of

HERE = torch.device("cpu")


@given(st.lists(st.integers(1, 9), max_size=6), st.sampled_from([1, 2, 4]))
def test_unpacking_brings_every_token_back_to_its_row_and_column(lengths: list[int], multiple: int) -> None:
    rows = rows_of([[100 * b + t for t in range(length)] for b, length in enumerate(lengths)] or [[0]])
    if not lengths:
        rows = rows.select(torch.zeros(0, dtype=torch.int64))
    packed = pack(rows, multiple_of=multiple, where=HERE)
    tokens = int((rows.lengths - 1).sum())
    assert packed.tokens.shape[1] % multiple == 0
    assert packed.tokens.shape[1] - tokens < (multiple if tokens else multiple + 1)  # no padding beyond the multiple
    assert packed.sequence.cu_seqlens_q[-1] == packed.tokens.shape[1]
    target = unpack(packed.targets.double(), packed)
    source = unpack(packed.tokens[0].double(), packed)
    position = unpack(packed.positions[0].double(), packed)
    for b, length in enumerate(lengths):
        assert target[b, : length - 1].tolist() == [100 * b + t for t in range(1, length)]
        assert source[b, : length - 1].tolist() == [100 * b + t for t in range(length - 1)]
        assert position[b, : length - 1].tolist() == list(range(length - 1))
        assert target[b, length - 1 :].abs().sum() == 0


def test_gradients_flow_back_to_the_packed_tokens_only_from_real_columns() -> None:
    packed = pack(rows_of([[1, 2, 3], [4], [5, 6]]), multiple_of=4, where=HERE)
    values = torch.ones(packed.tokens.shape[1], requires_grad=True)
    unpack(values, packed).sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 0]  # the last one is filler
