"""Phi-3 and Phi-4: Llama's layers, with optional partial RoPE."""

from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import ModelDescription, decoder, everywhere
from rftmega.model_providers.hf_config import HFConfig


def describe(config: HFConfig) -> ModelDescription:
    config.get("original_max_position_embeddings")  # used by longrope only
    model = decoder(config, partial_rope=True)
    if model.rope.kind != "default":
        raise CheckpointError(
            f"rope_type={model.rope.kind!r} is not supported in this family; default is."
        )
    return everywhere(model, config)
