"""Qwen3 with a mixture of experts: softmax over all experts, the best few taken, no shared expert."""

from dataclasses import replace
from typing import Any

from converters.decoders import experts_of, sparse_layers
from model_providers import qwen3
from model_providers.description import Experts, ModelDescription


def describe(hf_config: dict[str, Any]) -> ModelDescription:
    experts = Experts(
        number=experts_of(hf_config),
        active=hf_config["num_experts_per_tok"],
        ffn=hf_config["moe_intermediate_size"],
        layers=sparse_layers(hf_config),
        normalised=hf_config.get("norm_topk_prob", False),
    )
    return replace(qwen3.describe(hf_config), experts=experts)
