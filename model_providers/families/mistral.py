"""Mistral: Llama with a sliding window, of 4096 tokens where config.json says nothing."""

from model_providers.description import ModelDescription, decoder, with_windows
from model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return with_windows(decoder(config), config, used=True, default=4096)
