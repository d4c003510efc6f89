"""Qwen2 and Qwen2.5: a bias on q, k and v, which config.json does not mention."""

from typing import Any

from model_providers.description import ModelDescription, decoder_description


def describe(hf_config: dict[str, Any]) -> ModelDescription:
    return decoder_description(hf_config, qkv_bias=True, qk_norm=False)
