"""Saves the random models that are measured, of a shape where matrices dominate."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config


def save_model(folder: Path, **shape: Any) -> Path:
    """Saves a Qwen3 with 8 layers and a vocabulary of 4096, unless `shape` changes them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": 4096,
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
        | shape
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
