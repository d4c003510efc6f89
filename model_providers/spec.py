"""Chooses the modules of a layer: Transformer Engine's where it imports, otherwise Megatron's own
with our attention.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from rftmega.model_providers.attention import PackedAttention
from rftmega.model_providers.installed import uses_transformer_engine
from rftmega.model_providers.norm import LatentNorm, RMSNorm


def block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Returns the spec of the layers of this pipeline stage, or of its `chunk` where the schedule
    is interleaved.
    """
    if uses_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
    # Megatron-Core 0.16.1, where it failed to import Transformer Engine, asks for this name
    # nevertheless, and for its classes.
    vars(moe_utils).setdefault("te_general_gemm", None)
    multi_latent_attention.HAVE_TE = False
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk
    )
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        _use_ours(layer.submodules)
    block.layer_norm = RMSNorm
    return block


def replace_layers(block: TransformerBlockSubmodules, kind: type) -> None:
    """Lets the block be built of layers of this class."""
    for layer in block.layer_specs:
        layer.module = kind


def _use_ours(parts: TransformerLayerSubmodules) -> None:
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if isinstance(attention, MLASelfAttentionSubmodules):
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
