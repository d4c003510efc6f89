"""RMS norms of queries and of keys over all heads jointly, as in OLMo 2 (arXiv:2501.00656).
Megatron-Core 0.16 normalises each head separately. Here the squares are summed over the
tensor-parallel ranks, each of which holds some of the heads. Every rank holds the complete norm
weights: Megatron sums the gradients of parameters named q_layernorm and k_layernorm over the ranks.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor

from rftmega.models.layers.norm import RMSNorm


class FP32Norm(RMSNorm):
    """FP32Norm normalises queries or keys [tokens, batch, heads of this rank, D] over the heads of
    all ranks, in float32.
    """

    def __init__(self, config: TransformerConfig, heads: int, width: int, eps: float):
        super().__init__(config, heads * width, eps=eps)
        self._all_heads = heads
        self._group = get_tensor_model_parallel_group_if_none(None)

    def forward(self, given: Tensor) -> Tensor:
        mine, width = given.shape[-2:]
        group = self._group
        squares = given.float().square().sum((-2, -1), keepdim=True)
        # Both directions sum: each rank's heads are scaled by the squares of all of them.
        total = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares, group), group
        )
        # With fewer key heads than ranks, several ranks have the same one.
        copies = mine * group.size() // self._all_heads
        mean = total / (copies * self._all_heads * width)
        scaled = given.float() * torch.rsqrt(mean + self.eps)  # type: ignore[operator]
        first = group.rank() // copies * mine
        weight = self.weight.view(self._all_heads, width)[first : first + mine]
        return (weight * scaled).to(given.dtype)


class QueryNorm(FP32Norm):
    """QueryNorm normalises the queries over all attention heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        """Creates the norm; `hidden_size` is the size of one attention head."""
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(FP32Norm):
    """KeyNorm normalises the keys over all key-value heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        """Creates the norm; `hidden_size` is the size of one attention head."""
        super().__init__(config, config.num_query_groups or 1, hidden_size, eps)
