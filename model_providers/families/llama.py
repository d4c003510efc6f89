"""Llama 2 and 3."""

from model_providers.description import ModelDescription, decoder
from model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return decoder(config)
