"""Builds transformers decoders on the meta device, where parameters have shapes but no memory."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from rftmega.backends.decoder.describe import TransformersModel, describe_any
from rftmega.model_providers.output_head import decoder_of
from rftmega.model_providers.tower import VisionTower
from rftmega.model_providers.transformers_decoders import layers_of, refuse_shared

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

EXPERT_DIMENSIONS = 3  # of fused expert parameters


def vocabulary_of(model: "PreTrainedModel") -> nn.Module:
    """Returns the text decoder of a model: all of it without the LM head and any vision encoder."""
    inner = decoder_of(model)
    decoder: nn.Module = getattr(inner, "language_model", inner)
    return decoder


def describe(model: "PreTrainedModel", tower: VisionTower | None = None) -> TransformersModel:
    """Returns the description of a built model with its parameters counted, on the meta device or
    another.
    `tower`: the description of its vision encoder.
    """
    said = describe_any(model.config, tower)
    outside = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    share = said.experts.active / said.experts.number if said.experts else 1.0
    counted, matrices = sum(parameter.numel() for parameter in model.parameters()), 0.0
    for parameter in vocabulary_of(model).parameters():
        if parameter.dim() > 1 and id(parameter) not in outside:
            fused = parameter.dim() == EXPERT_DIMENSIONS
            matrices += parameter.numel() * (share if fused else 1.0)
    return said.with_weights(counted, round(matrices))


def state_buffers(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """Returns the buffers that belong to a model's state, as a router's correction bias, by name.
    Checkpoints contain them, unlike buffers that are computed from the config.
    """
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def gathered_apart(model: "PreTrainedModel", head: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 gathers separately: the embedding, each layer, and `head`,
    which may replace the model's own LM head.
    All other parameters stay gathered during a whole pass, including a tied embedding, which is
    also the LM head. Raises CheckpointError if transformers does not name the class of the layers.
    """
    layers = layers_of(model)
    refuse_shared(model, layers)
    embedding = model.get_input_embeddings()
    if any(weight is embedding.weight for weight in head.parameters()):
        return layers
    return [embedding, *layers, head]
