"""Selects the modules of a layer: Transformer Engine's if it can be imported, otherwise Megatron's
with rftmega's attention and norms.
"""

import copy
from collections.abc import Callable, Collection

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from rftmega.model_providers.optional_cuda_packages import uses_transformer_engine
from rftmega.models.layers.adapter import with_adapter, with_adapters
from rftmega.models.layers.attention import PackedAttention
from rftmega.models.layers.expert_bias import with_expert_bias
from rftmega.models.layers.fp32_norm import KeyNorm, QueryNorm
from rftmega.models.layers.gated_delta_net import PackedDeltaNet
from rftmega.models.layers.norm import LatentNorm, RMSNorm
from rftmega.models.layers.output_gate import with_output_gate
from rftmega.models.layers.post_norm import with_norm_behind
from rftmega.models.layers.rotary_by_layer import with_own_rotary
from rftmega.models.layers.rotated_norm import with_rotated_norm
from rftmega.models.layers.scaled import with_factor
from rftmega.models.layers.shared_prefix_attention import with_shared_prefixes


def block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """Returns the layer specs (Megatron's TransformerBlockSubmodules) of this pipeline stage or,
    under interleaved scheduling, of its model chunk `chunk`.
    """
    if uses_transformer_engine():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
        for layer in {id(layer): layer for layer in block.layer_specs}.values():
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = with_shared_prefixes(attention.core_attention)
        return block
    # Without Transformer Engine, Megatron-Core 0.16.1 still asks for this name and for its classes.
    vars(moe_utils).setdefault("te_general_gemm", None)
    multi_latent_attention.HAVE_TE = False
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk
    )
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        _use_ours(layer.submodules)
    block.layer_norm = RMSNorm
    return block


def attend_linearly(
    block: TransformerBlockSubmodules,
    config: TransformerConfig,
    chunk: int | None,
    layers: Collection[int],
) -> None:
    """Replaces self-attention in a block's spec by a gated delta net, in those of the block's
    layers whose index in the whole model is among `layers`.
    """
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    made: dict[int, ModuleSpec] = {}
    for place, layer in enumerate(block.layer_specs):
        if first + place in layers:
            if id(layer) not in made:
                made[id(layer)] = _with_delta_net(layer)
            block.layer_specs[place] = made[id(layer)]


def _with_delta_net(layer: ModuleSpec) -> ModuleSpec:
    changed = copy.deepcopy(layer)  # later changes of a spec's MLP are made once in each
    parts = changed.submodules
    attention = parts.self_attention.submodules
    column = attention.linear_qkv
    if uses_transformer_engine():  # its fused layer contains the norm
        parts.input_layernorm, column = TENorm, TEColumnParallelLinear
    linear = GatedDeltaNetSubmodules(in_proj=column, out_proj=attention.linear_proj)
    parts.self_attention = ModuleSpec(module=PackedDeltaNet, submodules=linear)
    return changed


def gate_attention(block: TransformerBlockSubmodules) -> None:
    """Gates the output of self-attention in a block's spec."""
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        attention = layer.submodules.self_attention
        if attention.module is not PackedDeltaNet:
            attention.module = with_output_gate(attention.module)


def replace_layers(block: TransformerBlockSubmodules, kind: type) -> None:
    """Replaces the module class of all layers in a block's spec by `kind`."""
    for layer in block.layer_specs:
        layer.module = kind


def allow_adapters(block: TransformerBlockSubmodules) -> None:
    """Replaces the linear layers of attention, MLPs and experts in a block's spec by subclasses
    that can have LoRA adapters.

    An adapter needs the input of the layer's matmul. Transformer Engine's fused norm and linear
    layers hide that input, so the norms become separate modules.
    """
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        parts = layer.submodules
        attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
        if uses_transformer_engine():
            parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
        if isinstance(attention, GatedDeltaNetSubmodules):
            attention.in_proj = with_adapter(attention.in_proj)
            attention.out_proj = with_adapter(attention.out_proj)
        else:
            if uses_transformer_engine():
                attention.linear_qkv = TEColumnParallelLinear
            attention.linear_qkv = with_adapter(attention.linear_qkv)
            attention.linear_proj = with_adapter(attention.linear_proj)
        if isinstance(mlp, MoESubmodules):
            grouped = issubclass(mlp.experts.module, TEGroupedMLP)
            _adapt(mlp.experts.submodules, with_adapters if grouped else with_adapter)
            _adapt(mlp.shared_experts.submodules, with_adapter)
            continue
        if uses_transformer_engine():
            mlp.linear_fc1 = TEColumnParallelLinear
        _adapt(mlp, with_adapter)


def _adapt(mlp: MLPSubmodules, adapted: Callable[[type], type]) -> None:
    mlp.linear_fc1, mlp.linear_fc2 = adapted(mlp.linear_fc1), adapted(mlp.linear_fc2)


def norm_behind(
    block: TransformerBlockSubmodules, *, adapters: bool, pre_norm: bool = False
) -> None:
    """Adds norms after the output projections of attention and MLP, in a block's spec, and removes
    those before attention and MLP unless `pre_norm`.

    `adapters`: whether `allow_adapters` was applied, which separates norms from linear layers.
    """
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        parts = layer.submodules
        attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
        attention.linear_proj = with_norm_behind(attention.linear_proj)
        mlp.linear_fc2 = with_norm_behind(mlp.linear_fc2)
        if pre_norm:
            continue
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        if uses_transformer_engine() and not adapters:  # its fused layers contain the norm
            attention.linear_qkv = mlp.linear_fc1 = TEColumnParallelLinear


def norm_all_heads(block: TransformerBlockSubmodules) -> None:
    """Replaces, in a block's spec, the q and k norms of each head by norms over all heads."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm


def norm_rotated_heads(block: TransformerBlockSubmodules) -> None:
    """Moves, in a block's spec, the q and k norms behind rotary embeddings."""
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = IdentityOp
        attention.core_attention = with_rotated_norm(attention.core_attention)


def rotate_by_layer(block: TransformerBlockSubmodules) -> None:
    """Lets each attention in a block's spec take the rotary embeddings of its own kind."""
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        attention = layer.submodules.self_attention
        attention.module = with_own_rotary(attention.module)


def attend_with_sinks(block: TransformerBlockSubmodules) -> None:
    """Replaces the core attention in a block's spec by the one that supports attention sinks in
    packed rows; Transformer Engine's does not.
    """
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        layer.submodules.self_attention.submodules.core_attention = PackedAttention


def train_expert_biases(block: TransformerBlockSubmodules) -> None:
    """Replaces the second linear layers of experts in a block's spec by subclasses whose biases are
    trained rightly.
    """
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        mlp = layer.submodules.mlp.submodules
        if isinstance(mlp, MoESubmodules):
            experts = mlp.experts.submodules
            experts.linear_fc2 = with_expert_bias(experts.linear_fc2)


def scale_residual(block: TransformerBlockSubmodules, factor: float) -> None:
    """Multiplies, in a block's spec, what attention and MLP add to the hidden states by `factor`."""
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        attention, mlp = (
            part.submodules for part in (layer.submodules.self_attention, layer.submodules.mlp)
        )
        attention.linear_proj = with_factor(attention.linear_proj, factor)
        mlp.linear_fc2 = with_factor(mlp.linear_fc2, factor)


def _use_ours(parts: TransformerLayerSubmodules) -> None:
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if isinstance(attention, MLASelfAttentionSubmodules):
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
