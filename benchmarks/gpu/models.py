"""Builds large models without large files: weights that are holes on the disk, and random numbers
generated on the device.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from rftmega.converters import table
from rftmega.converters.rules import instances
from rftmega.model_providers.hf_config import read_hf_config

CODES = {"bfloat16": "BF16", "float32": "F32"}
BYTES = {"bfloat16": 2, "float32": 4}


class Shape(NamedTuple):
    """Shape is that of a Qwen3, or with `experts` of a Qwen3-MoE with experts in all layers,
    `active` of them per token, each `expert_ffn` wide.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0


QWEN3_8B = Shape(36, 4096, 12288, 32, 8, 128, 151936)
QWEN3_30B_A3B = Shape(48, 2048, 6144, 32, 4, 128, 151936, experts=128, active=8, expert_ffn=768)
TINY = Shape(2, 64, 96, 4, 2, 32, 131)
TINY_MOE = TINY._replace(experts=4, active=2, expert_ffn=48)


def save_config(folder: Path, shape: Shape, *, dtype: str) -> Path:
    """Writes config.json alone, for uses that never read weights."""
    fields: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    config: Any
    if shape.experts:
        config = Qwen3MoeConfig(
            **fields, architectures=["Qwen3MoeForCausalLM"], num_experts=shape.experts, num_experts_per_tok=shape.active,
            moe_intermediate_size=shape.expert_ffn, norm_topk_prob=True,
        )  # fmt: skip
    else:
        config = Qwen3Config(**fields, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    return folder


def save_zeros(folder: Path, shape: Shape, *, dtype: str) -> Path:
    """Writes a folder whose weights are zeros and take no disk space; fill the model with
    `randomise` once it is built.
    """
    save_config(folder, shape, dtype=dtype)
    header: dict[str, Any] = {}
    end = 0
    for rule, layer, expert in instances(
        table(read_hf_config(folder)), layers=shape.layers, experts=shape.experts
    ):
        for name, tensor in zip(rule.hf_names(layer, expert), rule.hf, strict=True):
            size = torch.Size(tensor.shape).numel() * BYTES[dtype]
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + size],
            }
            end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@torch.no_grad()
def randomise(manager: Any, *, seed: int = 0) -> None:
    """Replaces the weights by random numbers, since zeros are faster to multiply; norms are 1."""
    torch.manual_seed(seed)
    for parameter in parameters_of(manager):
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    if hasattr(manager, "chunks"):  # Megatron's optimizer holds copies
        manager.weights_changed()


def parameters_of(manager: Any) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters of a Megatron or FSDP2 model."""
    for module in getattr(manager, "chunks", None) or [manager.model]:
        yield from module.parameters()
