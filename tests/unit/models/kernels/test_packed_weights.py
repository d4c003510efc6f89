import math

import pytest
import torch

from rftmega.models.kernels.packed_weights import pack


def rounded(row: list[float]) -> list[float]:
    """Rounds a row as 8 bits do, 64 columns after 64."""
    found: list[float] = []
    for start in range(0, len(row), 64):
        block = row[start : start + 64]
        scale = max(map(abs, block)) / 127 or 1.0
        found += [round(value / scale) * scale for value in block]
    return found


@pytest.mark.parametrize("columns", [1, 64, 100, 192])
def test_a_weight_becomes_127ths_of_the_largest_of_each_64_columns(columns: int) -> None:
    weight = torch.randn(5, columns, dtype=torch.float32) * torch.logspace(-4, 2, 5)[:, None]
    weight[2] = 0
    before = weight.clone()
    wanted = torch.tensor([rounded(row) for row in before.double().tolist()])
    (packed,), error = pack([weight], wide=64)
    torch.testing.assert_close(weight, wanted.float(), rtol=1e-6, atol=0)
    assert torch.equal(packed.unpacked(), weight)
    wrong = (wanted - before).square().sum() / before.square().sum()
    assert error == pytest.approx(math.sqrt(wrong), rel=1e-3, abs=1e-7)


def test_packed_weights_take_little_more_than_a_byte_an_element() -> None:
    (packed,), error = pack([torch.randn(256, 512).bfloat16()], wide=64)
    assert packed.nbytes == 256 * 512 + 256 * 8 * 4
    assert 0.003 < error < 0.01
