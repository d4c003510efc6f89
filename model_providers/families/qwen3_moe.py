"""Qwen3-MoE: experts are selected by the top-k of a softmax over all experts; there is no shared
expert.
"""

from dataclasses import replace

from rftmega.converters.decoder import number_of_experts, qwen_sparse_layers
from rftmega.model_providers.description import Experts, ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only("use_sliding_window", False, why="no published model of this family has one")
    for unused in ("sliding_window", "max_window_layers"):
        config.get(unused)
    experts = Experts(
        number=number_of_experts(config),
        active=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=qwen_sparse_layers(config),
        normalised=config["norm_topk_prob"],
    )
    return replace(decoder(config, qk_norm=True), experts=experts)
