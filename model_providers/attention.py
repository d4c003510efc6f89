"""Core attention over packed rows in plain torch: no token sees another row, and no padding is computed."""

from collections import defaultdict

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn import functional as F


class PackedAttention(torch.nn.Module):
    """Causal, grouped-query. Drop-in for Megatron's DotProductAttention on a CPU and on CUDA without Transformer Engine."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Packed, with `cu_seqlens_q`: [tokens, heads, d] -> [tokens, heads * d]; else [s, b, heads, d] -> [s, b, heads * d]."""
        assert attention_bias is None, "attention_bias is not supported"
        if packed_seq_params is None:
            rows = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(*rows).permute(2, 0, 1, 3).flatten(2)
        attended = []
        groups = row_groups(packed_seq_params)
        for index in groups:
            rows = (x[index].transpose(1, 2) for x in (query, key, value))
            attended.append(self._attend(*rows).transpose(1, 2).flatten(0, 1))
        order = torch.cat([index.flatten() for index in groups])
        return torch.cat(attended)[order.argsort()].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads, s, d] -> the same."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
        )


def row_groups(packed: PackedSeqParams) -> list[Tensor]:
    """Token indices [rows, length] of all rows of one length, for each length.

    Rows of one length are one batch: a call a row would cost more than the attention of short rows. Kept with the
    micro-batch, so that its layers share one look at the lengths.
    """
    groups: list[Tensor] | None = getattr(packed, "row_groups", None)
    if groups is None:
        edges = packed.cu_seqlens_q.tolist()
        starts: dict[int, list[int]] = defaultdict(list)
        for start, stop in zip(edges, edges[1:], strict=False):
            starts[stop - start].append(start)
        where = packed.cu_seqlens_q.device
        groups = [
            torch.tensor(begin, device=where)[:, None] + torch.arange(length, device=where) for length, begin in starts.items()
        ]
        packed.row_groups = groups
    return groups
