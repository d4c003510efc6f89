"""Mistral: Llama with a sliding window, by default of 4096 tokens."""

from rftmega.model_providers.description import ModelDescription, decoder, everywhere
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return everywhere(decoder(config), config)
