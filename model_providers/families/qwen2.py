"""Qwen2 and Qwen2.5: q, k and v have a bias, which config.json does not mention."""

from rftmega.model_providers.description import ModelDescription, decoder, qwen_windows
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only("use_mrope", False, why="positions of images are not represented")
    return qwen_windows(decoder(config, qkv_bias=True), config)
