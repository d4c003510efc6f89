"""The value head of critics and reward models."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueHead(torch.nn.Module):
    """ValueHead maps hidden states to one value per token; every tensor-parallel process of the
    last pipeline stage holds all of it.
    """

    def __init__(self, config: Any, *, bias: bool):
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [N, 1, H], or this process's part of them under sequence parallelism,
        to values [N] in float32.
        """
        if self.sequence_parallel:
            # All processes compute the same from here, so each keeps its own part of the gradient.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden[:, 0], self.weight, self.bias)[:, 0].float()
