"""Qwen3.5's MoE models, text only: as Qwen3-Next, with MoE in every layer; the weights of the
active experts sum to 1.
"""

from dataclasses import replace

from rftmega.model_providers.delta_net import delta_net_decoder
from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.families.qwen2_moe import gated_experts
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only(
        "norm_topk_prob", True, why="transformers' model of this family has no other weights"
    )
    experts = gated_experts(config, normalised=True)
    return replace(delta_net_decoder(config), experts=experts)
