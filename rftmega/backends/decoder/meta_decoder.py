"""Builds a decoder of transformers on the meta device: the shapes of its parameters, without memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rftmega.backends.decoder.describe import SEEING, TransformersModel, describe_any
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.tower import VisionTower

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

EXPERT_DIMENSIONS = 3  # of the parameters that transformers fuses experts into


def on_meta(config: Any, attention: str) -> "PreTrainedModel":
    """Builds the decoder of a config, in float32. A vision tower has an attention of its own.

    Raises ValueError, ImportError where transformers knows that it can't have this attention.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = config.model_type in SEEING
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    chosen = {"text_config": attention, "vision_config": "sdpa"} if sees else attention
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(
            config, dtype=torch.float32, attn_implementation=chosen, trust_remote_code=False
        )
    model.tie_weights()
    return model.eval()


def vocabulary_of(model: "PreTrainedModel") -> nn.Module:
    """Returns the decoder of text, which is all of most models but their head."""
    decoder: nn.Module = getattr(model.base_model, "language_model", model.base_model)
    return decoder


def describe(model: "PreTrainedModel", tower: VisionTower | None = None) -> TransformersModel:
    """Describes a model that was built, on the meta device or not, and counts its weights."""
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


def layers_of(model: "PreTrainedModel") -> list[nn.Module]:
    """Returns a model's layers, those of a tower among them.

    Raises CheckpointError where transformers does not name their class.
    """
    kinds = set(model._no_split_modules or ())
    layers = [each for each in model.base_model.modules() if type(each).__name__ in kinds]
    if not layers:
        raise CheckpointError(
            f"transformers does not say which modules of {type(model).__name__} are its layers (_no_split_modules), so "
            "nothing could be gathered layer by layer. Take backend=megatron, or another model."
        )
    return layers


def gathered_apart(model: "PreTrainedModel", head: nn.Module) -> list[nn.Module]:
    """Returns the modules whose parameters FSDP2 gathers together, one after another: the embedding,
    each layer, and `head`, which stands for the model's own. What is in none of them is gathered
    for a whole pass; so is a tied embedding, since it is the head, too.

    Raises CheckpointError where transformers does not name the class of the layers.
    """
    layers = layers_of(model)
    embedding = model.get_input_embeddings()
    if any(weight is embedding.weight for weight in head.parameters()):
        return layers
    return [embedding, *layers, head]
