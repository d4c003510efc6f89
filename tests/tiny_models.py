"""Tiny random Hugging Face models on disk, one a family and variant; shapes are odd on purpose."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Exaone4Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

VOCABULARY = 131  # prime: every tensor-parallel size needs padding rows
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
EXPERTS = {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GLM: dict[str, Any] = {
    name: value
    for name, value in LATENT.items()
    if not name.endswith("_rank") and not name.startswith(("qk_", "v_"))
} | {"num_key_value_heads": 2, "head_dim": 24, "attention_bias": True, "use_qk_norm": True}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
}
# A head whose output is near 0 is normalised: with a smaller epsilon, rounding would be all of it.
DELTA_NET = {
    **{"head_dim": 32, "tie_word_embeddings": False},
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 12, "rms_norm_eps": 1e-3},
    "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.25},
}
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied-llama3-rope": (
        LlamaConfig,
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama-linear-rope": (
        LlamaConfig,
        {"tie_word_embeddings": False, "rope_parameters": LINEAR_ROPE},
    ),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-yarn": (LlamaConfig, {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "mistral-window": (MistralConfig, {"tie_word_embeddings": False, "sliding_window": 8}),
    "qwen2-late-window": (
        Qwen2Config,
        {
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "mixtral": (
        MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    ),
    "qwen2-moe": (
        Qwen2MoeConfig,
        EXPERTS
        | {
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek-v3": (DeepseekV3Config, LATENT),
    "deepseek-v3-yarn-plain-queries": (
        DeepseekV3Config,
        LATENT
        | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-plain-weights": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": False}),
    "glm4-moe": (Glm4MoeConfig, GLM | {"routed_scaling_factor": 2.5}),
    "glm4-moe-one-group": (
        Glm4MoeConfig,
        GLM
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "use_qk_norm": False}
        | {"rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.75}},
    ),
    "olmo2": (Olmo2Config, {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}),
    "phi3": (
        Phi3Config,
        {"tie_word_embeddings": False, "sliding_window": 6, "pad_token_id": None},
    ),
    "phi3-tied-part-of-heads": (
        Phi3Config,
        {
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "head_dim": 16,
            "pad_token_id": None,
        },
    ),
    "phi4-mini": (
        Phi3Config,
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "pad_token_id": None,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 700.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.25, 1.5, 1.9, 2.4],
                "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
            },
        },
    ),
    "arcee": (ArceeConfig, {"tie_word_embeddings": False}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 3, "pad_token_id": None}),
    "smollm3-window": (
        SmolLM3Config,
        {
            "tie_word_embeddings": False,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
            "pad_token_id": None,
        },
    ),
    "granite": (
        GraniteConfig,
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.4},
            **{"residual_multiplier": 0.7, "logits_scaling": 1.7, "tie_word_embeddings": True},
        },
    ),
    "exaone4": (
        Exaone4Config,
        {"sliding_window": 6, "sliding_window_pattern": 3, "tie_word_embeddings": False},
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            **{"sliding_window": 6, "sliding_window_pattern": 3, "head_dim": 32},
            **{"query_pre_attn_scalar": 20, "rope_parameters": TWO_ROPES, "pad_token_id": None},
        },
    ),
    "hunyuan": (HunYuanDenseV1Config, {"head_dim": 32, "pad_token_id": None}),
    "gpt-oss": (
        GptOssConfig,
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
            **{"sliding_window": 6, "swiglu_limit": 1.5, "tie_word_embeddings": False},
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
            "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4": (Glm4Config, {"head_dim": 24, "tie_word_embeddings": False, "pad_token_id": None}),
    "qwen3.5": (Qwen3_5TextConfig, DELTA_NET),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 56},
    ),
    "qwen3-next-moe": (
        Qwen3NextConfig,
        DELTA_NET
        | EXPERTS
        | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "seed-oss": (SeedOssConfig, {"head_dim": 32, "tie_word_embeddings": False}),
}


def save_tiny(folder: Path, variant: str, *, seed: int = 0, **changes: Any) -> Path:
    """Writes config.json and weights; norms and biases are random too, so that a swapped one shows."""
    torch.manual_seed(seed)
    family, settings = VARIANTS[variant]
    model = AutoModelForCausalLM.from_config(
        family(**(SHAPE | settings | changes)), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def with_predictor(folder: Path, layer: int) -> list[str]:
    """Adds DeepSeek-V3's layer for predicting a second token behind the last, as its makers publish
    it; its tensors.
    """
    tensors = load_file(folder / "model.safetensors")
    like = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.3.")}
    added = {
        name.replace("layers.3.", f"layers.{layer}."): tensor.clone()
        for name, tensor in like.items()
    }
    copies = {
        "embed_tokens": "model.embed_tokens",
        "shared_head.norm": "model.norm",
        "shared_head.head": "lm_head",
    }
    for name, source in copies.items():
        added[f"model.layers.{layer}.{name}.weight"] = tensors[f"{source}.weight"].clone()
    added |= {f"model.layers.{layer}.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm")}
    added[f"model.layers.{layer}.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors | added, folder / "model.safetensors")
    return sorted(added)


def transformers_logits(folder: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """[length, V] a row, one row at a time: no padding anywhere."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0] for row in rows]
