"""Rotary embeddings that differ between layers with a sliding window and others, as in Gemma 3
(arXiv:2503.19786).
A GPTModel of Megatron-Core 0.16 has one module of rotary angles, whose output it hands to all
layers. Here this output has the angles of both kinds, and each layer's attention takes its half.
"""

import copy
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn


class RotaryByLayer(nn.Module):
    """RotaryByLayer returns angles [length, 1, 1, 2 D]: those of layers without a sliding window,
    then those of the others.
    """

    def __init__(self, table: Any, local_base: float):
        """`table`: Megatron's rotary module for layers without a sliding window; `local_base`: base
        of the others, whose positions are not scaled.
        """
        super().__init__()
        self.table: Any = table
        self.local: Any = copy.copy(table)
        half = len(self.local.inv_freq)
        steps = torch.arange(half, dtype=torch.float32, device=self.local.inv_freq.device) / half
        self.local.inv_freq = 1.0 / local_base**steps
        self.local.seq_len_interpolation_factor = None

    def get_rotary_seq_len(self, *given: Any, **named: Any) -> int:
        return self.table.get_rotary_seq_len(*given, **named)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        return torch.cat([self.table(*given, **named), self.local(*given, **named)], -1)


class OwnRotary:
    """OwnRotary is a mixin with which an attention takes its half of RotaryByLayer's angles."""

    config: Any
    layer_number: int

    def forward(self, *given: Any, rotary_pos_emb: Tensor, **named: Any) -> Any:
        of_windows = is_layer_window_attention(
            self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
        )
        own = rotary_pos_emb.chunk(2, -1)[int(of_windows)].contiguous()
        return super().forward(*given, rotary_pos_emb=own, **named)  # type: ignore[misc]


@cache
def with_own_rotary(attention: type) -> type:
    """Returns a subclass of Megatron's self-attention that takes the rotary angles of its layer."""
    return type(f"{attention.__name__}WithOwnRotary", (OwnRotary, attention), {})
