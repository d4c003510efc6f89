"""Builds Megatron's TransformerConfig, and a pipeline chunk as a GPTModel, from a ModelDescription."""

import logging
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import rftmega.runtime.device.before_megatron  # noqa: F401

# isort: split

from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import MLATransformerConfig

from rftmega.config import ParallelConfig
from rftmega.converters import padded_vocabulary
from rftmega.model_providers import spec
from rftmega.model_providers.audio_language import AudioEncoder, AudioLanguageModel
from rftmega.model_providers.description import (
    DeltaNet,
    Experts,
    LatentAttention,
    ModelDescription,
)
from rftmega.model_providers.optional_cuda_packages import (
    fused_kernels,
    installed,
    uses_transformer_engine,
)
from rftmega.model_providers.rope import Rope
from rftmega.model_providers.tower import AudioTower
from rftmega.model_providers.vision import DeepstackLayer, VisionLanguageModel, build_tower
from rftmega.models.layers.latent_attention import mend_latent_attention, rotate_by_position
from rftmega.models.layers.padding_row import freeze_padding
from rftmega.models.layers.rotary import MultimodalRotary, PackedRotary
from rftmega.models.layers.rotary_by_layer import RotaryByLayer
from rftmega.models.layers.scaled import scale_output


def transformer_config(
    model: ModelDescription,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    *,
    dropout: float = 0.0,
    fp8: str = "none",
) -> TransformerConfig:
    """Returns Megatron's TransformerConfig for a model in a parallel layout; parameters are in
    `dtype`. `dropout`: probability for hidden states and attention; `fp8`: recipe of FP8 matmuls,
    "none": no FP8.
    """
    interleaved = parallel.virtual_pipeline > 1
    kind = MLATransformerConfig if model.latent else TransformerConfig
    config = kind(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.zero_centered,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=model.gated,
        **_activation(model),
        add_bias_linear=model.biased,
        add_qkv_bias=model.qkv_bias,
        attention_output_gate=model.output_gate,
        rotary_interleaved=model.rotated_pairs,
        softmax_type="learnable" if model.sinks else "vanilla",
        init_method_std=model.init_std,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers or None,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        # With two stages, both neighbours are the same process, and batched P2P silently pairs the
        # wrong messages.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Losses return sums and counts; gradients are divided once, by the global token count.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length, so the stages exchange shapes.
        variable_seq_lengths=True,
        **_RECOMPUTE[parallel.recompute],
        **_FP8[fp8],
        **(_experts(model, model.experts, parallel) if model.experts else {}),
        **(_latent(model.latent, model.rope) if model.latent else {}),
        **(_windows(model, model.window) if model.window else {}),
        **(_unrotated(model) if model.unrotated else {}),
        **(_delta_net(model, model.delta_net) if model.delta_net else {}),
        softmax_scale=model.scales.attention,
        **fused_kernels(installed(), model, parallel, dtype),
    )
    if (yarn := model.rope.yarn) and not model.latent:
        # Not fields of the class: GPTModel and its attention read attributes of these names.
        vars(config).update(
            yarn_rotary_scaling_factor=model.rope.factor,
            yarn_original_max_position_embeddings=yarn.original_positions,
            yarn_beta_fast=yarn.beta_fast,
            yarn_beta_slow=yarn.beta_slow,
            yarn_mscale=yarn.mscale,
            yarn_mscale_all_dim=yarn.mscale_all_dim,
            yarn_correction_range_round_to_int=yarn.truncate,
        )
    if long := model.rope.long:
        # attention reads it as YaRN's factor f, and multiplies sines and cosines by 0.1 ln f + 1
        vars(config)["yarn_rotary_scaling_factor"] = math.exp(10 * (long.attention_factor - 1))
    return config


_ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "relu2": squared_relu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def _activation(model: ModelDescription) -> dict[str, Any]:
    if model.clamped is None:
        return {"activation_func": _ACTIVATIONS[model.activation]}
    return {
        "activation_func": partial(_swish, model.clamped.alpha),
        "activation_func_clamp_value": model.clamped.limit,
        "glu_linear_offset": 1.0,
    }


def _swish(alpha: float, given: Tensor) -> Tensor:
    return given * torch.sigmoid(alpha * given)


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


# Transformer Engine would keep FP8 copies of the weights, which nothing offloads.
_BLOCKS = {"fp8": "e4m3", "disable_parameter_transpose_cache": True}
_FP8: dict[str, dict[str, Any]] = {
    "none": {},
    "blockwise": {"fp8_recipe": "blockwise", **_BLOCKS},
    "mxfp8": {"fp8_recipe": "mxfp8", **_BLOCKS},
}


def _windows(model: ModelDescription, window: int) -> dict[str, Any]:
    return {
        "window_size": (window - 1, 0),  # tokens before this one, and after
        "window_attn_skip_freq": [int(layer in model.windowed) for layer in range(model.layers)],
    }


def _unrotated(model: ModelDescription) -> dict[str, Any]:
    return {"no_rope_freq": [int(layer in model.unrotated) for layer in range(model.layers)]}


def _delta_net(model: ModelDescription, net: DeltaNet) -> dict[str, Any]:
    return {
        "linear_attention_freq": [int(layer in net.layers) for layer in range(model.layers)],
        "linear_conv_kernel_dim": net.convolved,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_num_key_heads": net.key_heads,
        "linear_num_value_heads": net.value_heads,
    }


def _latent(latent: LatentAttention, rope: Rope) -> dict[str, Any]:
    """Returns all config fields of multi-head latent attention; all are set because Megatron's
    default scales RoPE by 40.
    """
    yarn = rope.yarn
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": rope.base,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": yarn.original_positions if yarn else 0,
        "beta_fast": yarn.beta_fast if yarn else 0.0,
        "beta_slow": yarn.beta_slow if yarn else 0.0,
        "mscale": yarn.mscale if yarn and yarn.mscale is not None else 1.0,
        "mscale_all_dim": yarn.mscale_all_dim if yarn and yarn.mscale_all_dim is not None else 0.0,
    }


def _experts(model: ModelDescription, experts: Experts, parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.number,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(model.layers)],
        # A softmax over the top k equals a normalised softmax over all experts.
        "moe_router_pre_softmax": not experts.sigmoid and not experts.normalised,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_dtype": "fp32" if experts.sigmoid else None,  # as transformers computes each
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.active_groups if experts.groups > 1 else None,
        "moe_router_enable_expert_bias": experts.sigmoid,
        "moe_router_bias_update_rate": 0.0,  # the expert bias is a regular weight here
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.shared_gate,
        # No load-balancing loss: it would change the RL objective.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _not_about_probabilities(record: logging.LogRecord) -> bool:
    """Returns False for DeepEP's repeated log message that it casts bfloat16 probabilities to
    float32, which is lossless; True for other log records.
    """
    return "float32 probs" not in record.getMessage()


def build_chunk(
    model: ModelDescription,
    config: TransformerConfig,
    *,
    pre_process: bool,
    post_process: bool,
    chunk: int | None = None,
    head: bool = True,
    freeze_vision: bool = False,
    adapters: bool = False,
) -> GPTModel:
    """Builds this pipeline stage's layers or, under interleaved scheduling, its model chunk
    `chunk`, randomly initialised.

    `pre_process`, `post_process`: the chunk contains the embedding or the LM head. `head=False`
    omits the LM head, because value models have a value head instead. `freeze_vision`: the vision
    or audio encoder is frozen. `adapters`: linear layers can have LoRA adapters.
    """
    rope = model.rope
    if config.gradient_accumulation_fusion and not installed().weight_gradients:
        # Transformer Engine's layers have their own kernel. Megatron's output layer refuses to be
        # built without apex's, so it is built as if apex were there; the option is turned off
        # below.
        vars(layers)["_grad_accum_fusion_available"] = True
    if config.moe_token_dispatcher_type == "flex":
        logging.getLogger(token_dispatcher.__name__).addFilter(_not_about_probabilities)
    layers_spec = spec.block_spec(config, chunk)
    kind: Any = GPTModel
    more: dict[str, Any] = {}
    if model.tower:
        hears = isinstance(model.tower, AudioTower)
        kind = AudioLanguageModel if hears else VisionLanguageModel
        build: Any = AudioEncoder if hears else build_tower
        tower = build(model, config.params_dtype) if pre_process else None
        more = {"tower": tower, "frozen": freeze_vision}
    if model.delta_net:
        spec.attend_linearly(layers_spec, config, chunk, model.delta_net.layers)
    if model.output_gate:
        spec.gate_attention(layers_spec)
    if adapters:
        spec.allow_adapters(layers_spec)
    if model.post_norm:
        spec.norm_behind(layers_spec, adapters=adapters, pre_norm=model.pre_norm)
    if rope.local_base is not None:
        spec.rotate_by_layer(layers_spec)
    if model.full_width_qk_norm:
        spec.norm_all_heads(layers_spec)
    if model.rotated_qk_norm:
        spec.norm_rotated_heads(layers_spec)
    if model.biased:
        spec.train_expert_biases(layers_spec)
    if model.sinks:
        spec.attend_with_sinks(layers_spec)
    if model.scales.residual != 1.0:
        spec.scale_residual(layers_spec, model.scales.residual)
    if model.tower and model.tower.deepstack:
        spec.replace_layers(layers_spec, DeepstackLayer)
    built: GPTModel = kind(
        config,
        layers_spec,
        vocab_size=padded_vocabulary(model.vocabulary, config.tensor_model_parallel_size),
        max_sequence_length=model.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied and head,
        position_embedding_type="yarn" if rope.yarn and not model.latent else "rope",
        rotary_percent=rope.fraction,
        rotary_base=rope.base,  # type: ignore[arg-type]  # a float serves as well
        seq_len_interpolation_factor=rope.factor if rope.kind == "linear" else None,
        rope_scaling=rope.kind == "llama3",
        rope_scaling_factor=rope.factor,
        vp_stage=chunk,
        **more,
    )
    if pre_process and model.scales.embedding != 1.0:
        factor, rounded = model.scales.embedding, model.scales.rounded_embedding
        scale_output(built.embedding, factor, rounded=rounded)
    vars(built)["logits_factor"] = model.scales.logits  # see custom_forward
    if pre_process and model.padding is not None:
        freeze_padding(built.embedding.word_embeddings, model.padding)
    if post_process:
        built.output_layer.gradient_accumulation_fusion &= installed().weight_gradients
    if post_process and not head:
        del built.output_layer
    if rope.long:
        table: Any = built.rotary_pos_emb
        table.inv_freq = table.inv_freq / table.inv_freq.new_tensor(rope.long.divisors)
    if rope.local_base is not None:
        built.rotary_pos_emb = RotaryByLayer(built.rotary_pos_emb, rope.local_base)
    if rope.sections:
        built.rotary_pos_emb = MultimodalRotary(
            int(model.head_dim * rope.fraction),
            rope.base,
            rope.sections,
            interleaved=rope.interleaved,
            by_rows=uses_transformer_engine(),
        )
    elif not model.latent:
        built.rotary_pos_emb = PackedRotary(
            built.rotary_pos_emb,
            by_rows=uses_transformer_engine(),
            fused=bool(config.apply_rope_fusion),
        )
    if model.latent:
        mend_latent_attention(built, config)
        rotaries = rotate_by_position(built, by_rows=uses_transformer_engine())
        vars(built)["latent_rotaries"] = rotaries  # see custom_forward
    return built
