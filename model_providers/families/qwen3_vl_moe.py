"""Qwen3-VL-MoE: Qwen3-VL with experts selected by the top-k of a softmax over all experts; their
weights sum to 1.
"""

from dataclasses import replace

from rftmega.converters.decoder import number_of_experts, qwen_sparse_layers
from rftmega.model_providers.description import Experts, ModelDescription, decoder
from rftmega.model_providers.families.qwen3_vl import tower_of
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only(
        "norm_topk_prob", True, why="transformers' model of this family has no other weights"
    )
    experts = Experts(
        number=number_of_experts(config),
        active=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=qwen_sparse_layers(config),
        normalised=True,
    )
    return replace(decoder(config, qk_norm=True), experts=experts, tower=tower_of(config))
