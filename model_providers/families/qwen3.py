"""Qwen3 (dense): RMSNorm over each head of q and k, and an explicit head_dim."""

from rftmega.model_providers.description import ModelDescription, decoder, qwen_windows
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    return qwen_windows(decoder(config, qk_norm=True), config)
