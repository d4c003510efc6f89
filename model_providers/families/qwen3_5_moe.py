"""Qwen3.5's MoE models with their vision encoder."""

from dataclasses import replace

from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.families import qwen3_5_moe_text
from rftmega.model_providers.families.qwen3_vl import tower_of
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return replace(qwen3_5_moe_text.describe(config), tower=tower_of(config))
