"""Mistral: Llama with a sliding window, of 4096 tokens where config.json says nothing."""

from rftmega.model_providers.description import ModelDescription, decoder, everywhere
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return everywhere(decoder(config), config)
