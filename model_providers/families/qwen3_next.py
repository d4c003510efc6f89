"""Qwen3-Next: experts as in Qwen2-MoE, but in layers with gated delta nets and gated attention."""

from dataclasses import replace

from rftmega.model_providers.delta_net import delta_net_decoder
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.families.qwen2_moe import gated_experts
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    experts = gated_experts(config, normalised=config["norm_topk_prob"])
    return replace(delta_net_decoder(config), experts=experts)
