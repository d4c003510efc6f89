"""Experts whose rows transformers' grouped matmul can't take are computed one at a time."""

import pytest
import torch
from torch import nn

from rftmega.backends.fsdp.expert_rows import make_experts_fit


class Model(nn.Module):
    """A model with fused experts [2, out, in], beside a convolution of odd size."""

    def __init__(self, *shape: int):
        super().__init__()
        self.layer = nn.Module()
        self.layer.experts = nn.Module()
        self.layer.experts.up = nn.Parameter(torch.empty(2, *shape, device="meta"))
        self.convolution = nn.Parameter(torch.empty(6, 1, 3, device="meta"))
        self.chosen = "grouped_mm"

    def set_experts_implementation(self, name: str) -> None:
        self.chosen = name


@pytest.mark.parametrize(
    ("shape", "dtype", "tensor", "chosen"),
    [
        ((28, 64), torch.float32, 1, "grouped_mm"),
        ((28, 64), torch.float32, 2, "eager"),
        ((28, 64), torch.bfloat16, 1, "eager"),
        ((64, 26), torch.float32, 1, "eager"),
        ((64, 32), torch.bfloat16, 2, "grouped_mm"),
    ],
)
def test_rows_of_a_multiple_of_16_bytes_are_multiplied_together_and_others_are_not(
    shape: tuple[int, int], dtype: torch.dtype, tensor: int, chosen: str
) -> None:
    model = Model(*shape)
    make_experts_fit(model, dtype, tensor)
    assert model.chosen == chosen
