"""Hugging Face config -> TransformerConfig -> GPTModel: one file a family, listed in FAMILIES."""

from rftmega import device

device.prepare_megatron()

from model_providers.builder import build_chunk, transformer_config  # noqa: E402
from model_providers.description import ModelDescription, describe, layout_violations, read_hf_config  # noqa: E402

__all__ = ["ModelDescription", "build_chunk", "describe", "layout_violations", "read_hf_config", "transformer_config"]
