"""config.json of published models, as their makers wrote it: read without complaint, and of the
published size.
"""

import math
from typing import Any

import pytest

from rftmega.converters import instances, table
from rftmega.model_providers.description import describe

COMMON: dict[str, Any] = {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
                          "initializer_range": 0.02, "transformers_version": "4.44.0", "torch_dtype": "bfloat16",
                          "use_cache": True, "rms_norm_eps": 1e-6}  # fmt: skip
LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                  "rope_type": "llama3"}  # fmt: skip
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {  # name -> (parameters, the fields that matter)
    "Llama-3.1-8B": (8_030_261_248, {
        "model_type": "llama", "attention_bias": False, "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rope_scaling": LLAMA3_SCALING,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256}),
    "Qwen2.5-0.5B": (494_032_768, {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
        "use_sliding_window": False, "vocab_size": 151936}),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1_777_088_000, {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072,
        "max_window_layers": 21, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "use_mrope": False,
        "use_sliding_window": False, "vocab_size": 151936}),
    "Qwen3-8B": (8_190_735_360, {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}),
    "Mistral-7B-v0.1": (7_241_732_096, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000}),
    "Mixtral-8x7B-v0.1": (46_702_792_704, {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000}),
    "Qwen1.5-MoE-A2.7B": (14_315_784_192, {
        "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936}),
    "Qwen3-30B-A3B": (30_532_122_624, {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}),
    "Seed-OSS-36B-Base": (36_151_104_512, {
        "model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False, "head_dim": 128,
        "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
        "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1,
        "residual_dropout": 0.1, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
        "tie_word_embeddings": False, "vocab_size": 155136}),
    "phi-4": (14_659_507_200, {
        "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "hidden_size": 5120, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384, "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 250000,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 100352}),
    "phi-4-mini": (3_836_021_760, {
        "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "pad_token_id": 199999,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [1.0 + 0.9 * i for i in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064}),
    "gemma-3-270m": (268_098_176, {
        "model_type": "gemma3_text", "_sliding_window_pattern": 6, "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
        "intermediate_size": 2048, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": False, "vocab_size": 262144}),
    "SmolLM3-3B": (3_075_098_624, {
        "model_type": "smollm3", "attention_bias": False, "hidden_size": 2048, "intermediate_size": 11008,
        "max_position_embeddings": 65536, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256}),
    "OLMo-2-1124-7B": (7_298_617_344, {
        "model_type": "olmo2", "attention_bias": False, "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pad_token_id": 100277, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352}),
    "Qwen3.5-4B-text": (4_205_751_296, {
        "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4,
        "head_dim": 256, "hidden_size": 2560, "intermediate_size": 9216,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25, "tie_word_embeddings": True, "vocab_size": 248320,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"}}),
    "Qwen3-Next-80B-A3B": (79_674_391_296, {
        "model_type": "qwen3_next", "attention_bias": False, "decoder_sparse_step": 1, "full_attention_interval": 4,
        "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25, "rope_scaling": None,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}),
    "GLM-4.5-Air": (106_852_245_504, {
        "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552}),
    "Kimi-K2": (1_026_408_209_408, {
        "model_type": "kimi_k2", "attention_bias": False, "auto_map": {}, "aux_loss_alpha": 0.001, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
        "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840}),
    "MiniMax-M2": (228_689_748_992, {
        "model_type": "minimax_m2", "attn_type_list": [1] * 62, "auto_map": {}, "head_dim": 128, "hidden_size": 3072,
        "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "quantization_config": FP8,
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None, "swa_rope_theta": -1.0,
        "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064}),
    "GLM-4-9B-0414": (9_400_279_040, {
        "model_type": "glm4", "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 151552}),
    **{
        name: (parameters, {
            "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "max_position_embeddings": 131072,
            "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": layers, "num_key_value_heads": 8,
            "num_local_experts": experts, "output_router_logits": False, "pad_token_id": 199999,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                             "rope_type": "yarn", "truncate": False},
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": False, "vocab_size": 201088})
        for name, parameters, layers, experts in (
            ("gpt-oss-20b", 20_914_757_184, 24, 32), ("gpt-oss-120b", 116_829_156_672, 36, 128),
        )
    },
    "DeepSeek-V3": (671_026_404_352, {
        "model_type": "deepseek_v3", "attention_bias": False, "auto_map": {}, "aux_loss_alpha": 0.001, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
        "rope_scaling": YARN,
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_config_is_understood_and_gives_the_published_number_of_parameters(
    name: str,
) -> None:
    parameters, fields = PUBLISHED[name]
    model = describe(COMMON | fields)
    assert model.parameters == parameters
    experts = model.experts.number if model.experts else 0
    by_table = 0
    for rule, _, _ in instances(table(COMMON | fields), layers=model.layers, experts=experts):
        # a buffer in transformers
        if rule.exported and not rule.megatron[0].endswith("expert_bias"):
            by_table += sum(math.prod(tensor.shape) for tensor in rule.hf)
    assert by_table == parameters
