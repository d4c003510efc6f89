"""Llama 2 and 3."""

from typing import Any

from model_providers.description import ModelDescription, decoder_description
from rftmega.errors import CheckpointError


def describe(hf_config: dict[str, Any]) -> ModelDescription:
    if hf_config.get("attention_bias"):
        raise CheckpointError("attention_bias=true is not supported for Llama: it puts a bias on o_proj, too.")
    return decoder_description(hf_config, qkv_bias=False, qk_norm=False)
