"""Attention of Transformer Engine, which takes whole rows, for rows that share beginnings, too."""

from functools import cache
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from rftmega.models.layers.attention import PackedAttention


class SharedPrefixes:
    """SharedPrefixes is a mixin with which a core attention computes rows that share beginnings
    (`packed_seq_params.tree`) by PackedAttention, and all others itself.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *given: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **named: Any,
    ):
        arguments = config, layer_number, attn_mask_type, attention_type
        super().__init__(  # type: ignore[call-arg]
            *arguments, *given, softmax_scale=softmax_scale, pg_collection=pg_collection, **named
        )
        # no submodule: it has no parameters, and no name in a checkpoint
        vars(self)["of_shared"] = PackedAttention(
            config,
            layer_number,
            AttnMaskType.causal,
            attention_type,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *given: Any,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> Tensor:
        rows = query, key, value, attention_mask
        if getattr(packed_seq_params, "tree", None) is not None:
            attend: Any = vars(self)["of_shared"]
            found: Tensor = attend(*rows, packed_seq_params=packed_seq_params)
            return found
        return super().forward(  # type: ignore[misc]
            *rows, *given, packed_seq_params=packed_seq_params, **named
        )


@cache
def with_shared_prefixes(core_attention: type) -> type:
    """Returns a subclass of a core attention that takes rows that share beginnings."""
    return type(
        f"{core_attention.__name__}WithSharedPrefixes", (SharedPrefixes, core_attention), {}
    )
