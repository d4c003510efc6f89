"""The head of a value model."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Hidden states -> one number a token; the whole head on every tensor-parallel process of the
    last stage.
    """

    def __init__(self, config: Any, *, bias: bool):
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [N or its part, 1, H] to [N] float32."""
        if self.sequence_parallel:
            # Every process goes on alike, so each keeps its own part of the gradient.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden[:, 0], self.weight, self.bias)[:, 0].float()
