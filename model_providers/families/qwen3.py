"""Qwen3 (dense): RMSNorm over each head of q and k, head_dim of its own."""

from dataclasses import replace

from model_providers.description import ModelDescription, decoder, qwen_windows
from model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    model = replace(decoder(config, qk_norm=True), head_dim=config.get("head_dim", 128))
    return qwen_windows(model, config)
