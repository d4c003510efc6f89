"""Which modules a layer is made of: Transformer Engine's where it imports, otherwise Megatron's own with our attention."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from model_providers.attention import PackedAttention
from model_providers.norm import RMSNorm
from rftmega import device


def uses_transformer_engine() -> bool:
    """TE needs a CUDA device; without one, or without the package, the local spec serves."""
    if device.current().type != "cuda":
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers that this pipeline stage builds."""
    if uses_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
