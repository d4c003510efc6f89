"""ModelDescription -> TransformerConfig -> one pipeline chunk as a GPTModel."""

import torch
from torch.nn import functional as F

import rftmega.device.before_megatron  # noqa: F401

# isort: split

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig

from converters import padded_vocabulary
from model_providers import spec
from model_providers.description import ModelDescription
from rftmega.config import ParallelConfig


def transformer_config(model: ModelDescription, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config for this model and layout; parameters in `dtype`."""
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
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The seam: a loss gives sums and counts, and gradients are divided once, by the global count.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length; the stages tell each other the shape.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, of dense models as well
        # Fused kernels that only CUDA has; Transformer Engine brings its own.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def build_chunk(model: ModelDescription, config: TransformerConfig, *, pre_process: bool, post_process: bool) -> GPTModel:
    """The layers of this pipeline stage, randomly initialised."""
    return GPTModel(
        config,
        spec.block_spec(config),
        vocab_size=padded_vocabulary(model.vocabulary, config.tensor_model_parallel_size),
        max_sequence_length=model.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        seq_len_interpolation_factor=model.rope_linear_factor,
        rope_scaling=model.rope_llama3_factor is not None,
        rope_scaling_factor=model.rope_llama3_factor or 1.0,
    )
