"""ModelDescription -> TransformerConfig -> one pipeline chunk as a GPTModel."""

from typing import Any

import torch
from torch.nn import functional as F

import rftmega.device.before_megatron  # noqa: F401

# isort: split

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig

from converters import padded_vocabulary
from model_providers import spec
from model_providers.description import Experts, ModelDescription
from rftmega.config import ParallelConfig


def transformer_config(
    model: ModelDescription, parallel: ParallelConfig, dtype: torch.dtype, *, dropout: float = 0.0
) -> TransformerConfig:
    """Megatron's config for this model and layout; parameters in `dtype`."""
    interleaved = parallel.virtual_pipeline > 1
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
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
        # With two stages, both neighbours are the same process, and a batched exchange pairs the wrong messages: silently.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The seam: a loss gives sums and counts, and gradients are divided once, by the global count.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length; the stages tell each other the shape.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, of dense models as well
        **_RECOMPUTE[parallel.recompute],
        **(_experts(model, model.experts, parallel) if model.experts else {}),
        # Fused kernels that only CUDA has; Transformer Engine brings its own.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _experts(model: ModelDescription, experts: Experts, parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.number,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(model.layers)],
        # The softmax of the best few is the softmax of all, normalised.
        "moe_router_pre_softmax": not experts.normalised,
        # RL scores and learns with the router as it is; a balancing loss would be another objective.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": spec.uses_transformer_engine(),
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def build_chunk(
    model: ModelDescription,
    config: TransformerConfig,
    *,
    pre_process: bool,
    post_process: bool,
    chunk: int | None = None,
    head: bool = True,
) -> GPTModel:
    """The layers of this pipeline stage, or of its `chunk` where the schedule is interleaved, randomly initialised.

    `head=False` leaves the output head out: a value model has its own.
    """
    built = GPTModel(
        config,
        spec.block_spec(config, chunk),
        vocab_size=padded_vocabulary(model.vocabulary, config.tensor_model_parallel_size),
        max_sequence_length=model.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied and head,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        seq_len_interpolation_factor=model.rope_linear_factor,
        rope_scaling=model.rope_llama3_factor is not None,
        rope_scaling_factor=model.rope_llama3_factor or 1.0,
        vp_stage=chunk,
    )
    if post_process and not head:
        del built.output_layer
    return built
