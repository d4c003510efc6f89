"""Tiny decoders of many families, as transformers builds them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from rftmega.backends.fsdp.module import Built, meta_model, with_head

VOCABULARY = 131
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3-tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {}),
    "mistral with a window": ("MistralConfig", {"sliding_window": 6}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 6, "layer_types": WINDOWS, "tie_word_embeddings": True},
    ),
    "gemma2": ("Gemma2Config", {"sliding_window": 6, "layer_types": WINDOWS}),
    "glm4": ("Glm4Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": WINDOWS,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **MOE,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "num_experts": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "phi": ("PhiConfig", {}),
    "phi-tied": ("PhiConfig", {"tie_word_embeddings": True}),
    "phimoe": ("PhimoeConfig", {**MOE, "num_local_experts": 4, "lm_head_bias": True}),
    "codegen": (
        "CodeGenConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25, "tie_word_embeddings": True}),
}

# A linear attention's float32 has 1e-5 of a gradient's digits where its weights are larger.
NOISE = {"qwen3-next": 0.05}


def tiny(family: str, **more: Any) -> PreTrainedModel:
    """Builds a random decoder in float32 whose weights are far enough from 0 to tell layers apart."""
    kind, fields = FAMILIES[family]
    config = getattr(transformers, kind)(**(DECODER | fields | more))
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE.get(family, 0.15) * torch.randn(parameter.shape))
    return model


def save_decoder(folder: Path, family: str, **more: Any) -> Path:
    """Writes such a decoder as a Hugging Face folder."""
    tiny(family, **more).save_pretrained(folder)
    return folder


def built_of(folder: Path) -> Built:
    """The network of the model in `folder`, on the meta device."""
    model, unpacked = meta_model(str(folder))
    return with_head(model, unpacked, str(folder), value_model=False, head_bias=False)
