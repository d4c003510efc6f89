"""Llama 2 and 3."""

from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import ModelDescription, decoder
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.only("rope_interleaved", False, why="Llama rotates halves of a head")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise CheckpointError(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, which transformers wants here."
        )
    return decoder(config)
