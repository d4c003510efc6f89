"""Tiny random Hugging Face models on disk, one a family and variant; shapes are odd on purpose."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

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
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied-llama3-rope": (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (LlamaConfig, {"tie_word_embeddings": False, "rope_parameters": LINEAR_ROPE}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-plain-weights": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": False}),
}


def save_tiny(folder: Path, variant: str, *, seed: int = 0, **changes: Any) -> Path:
    """Writes config.json and weights; norms and biases are random too, so that a swapped one shows."""
    torch.manual_seed(seed)
    family, settings = VARIANTS[variant]
    model = AutoModelForCausalLM.from_config(family(**(SHAPE | settings | changes)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


def transformers_logits(folder: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """[length, V] a row, one row at a time: no padding anywhere."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0] for row in rows]
