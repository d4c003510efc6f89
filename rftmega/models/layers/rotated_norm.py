"""RMSNorms of each head of queries and keys after rotary embeddings, as in Hunyuan.
Megatron-Core 0.16 normalises queries and keys before it rotates them, so these norms are a part of
the core attention, which gets the rotated ones.
"""

from functools import cache
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rftmega.models.layers.norm import RMSNorm


class RotatedNorm:
    """RotatedNorm is a mixin that normalises the queries and keys of a core attention.

    Megatron sums the gradients of parameters named q_layernorm and k_layernorm over the
    tensor-parallel ranks, each of which has some of the heads.
    """

    def __init__(self, config: TransformerConfig, *given: Any, **named: Any):
        super().__init__(config, *given, **named)  # type: ignore[call-arg]
        width, epsilon = config.kv_channels, config.layernorm_epsilon
        assert width is not None
        self.q_layernorm = RMSNorm(config, width, eps=epsilon)
        self.k_layernorm = RMSNorm(config, width, eps=epsilon)

    def forward(self, query: Tensor, key: Tensor, *given: Any, **named: Any) -> Tensor:
        normed = self.q_layernorm(query), self.k_layernorm(key)
        found: Tensor = super().forward(*normed, *given, **named)  # type: ignore[misc]
        return found

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the norms, which every tensor-parallel rank has whole, for Megatron's distributed
        checkpoints; core attentions have no parameters of their own.
        """
        norms = {"q_layernorm": self.q_layernorm, "k_layernorm": self.k_layernorm}
        state = {f"{name}.weight": norm.weight for name, norm in norms.items()}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, sharded_offsets=sharded_offsets
        )
        return found


@cache
def with_rotated_norm(core_attention: type) -> type:
    """Returns a subclass of a core attention that normalises its queries and keys."""
    return type(f"{core_attention.__name__}WithNorms", (RotatedNorm, core_attention), {})
