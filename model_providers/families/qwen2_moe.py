"""Qwen2 with a mixture of experts: weights that need not add up to 1, and one gated expert for every token."""

from dataclasses import replace

from converters.decoder import number_of_experts, qwen_sparse_layers
from model_providers.description import Experts, ModelDescription, decoder, qwen_windows
from model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    experts = Experts(
        number=number_of_experts(config),
        active=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=qwen_sparse_layers(config),
        normalised=config.get("norm_topk_prob", False),
        shared_ffn=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    model = replace(decoder(config, qkv_bias=config.get("qkv_bias", True)), experts=experts)
    return qwen_windows(model, config)
