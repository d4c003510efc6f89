"""Llama 2 and 3."""

from model_providers.description import ModelDescription, decoder
from model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only("rope_interleaved", False, why="Llama rotates halves of a head")
    return decoder(config)
