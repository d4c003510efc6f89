"""Builds transformers decoders on the meta device, where parameters have shapes but no memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rftmega.backends.decoder.describe import SEEING, TransformersModel, describe_any
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.output_head import decoder_of
from rftmega.model_providers.tower import VisionTower

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel

EXPERT_DIMENSIONS = 3  # of fused expert parameters


def on_meta(config: Any, attention: str) -> "PreTrainedModel":
    """Builds the decoder of a config in float32, with the attention implementation `attention` in
    its text layers and SDPA in a vision encoder.
    Raises ValueError or ImportError if transformers can't use this attention implementation.
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


def layers_of(model: "PreTrainedModel") -> list[nn.Module]:
    """Returns a model's layers, including those of a vision encoder.

    Where transformers does not name the class of the layers, they are the longest list of modules
    of one class. Raises CheckpointError if there is none.
    """
    kinds = set(model._no_split_modules or ())
    decoder = decoder_of(model)
    named = [each for each in decoder.modules() if type(each).__name__ in kinds]
    inner = {id(part) for each in named for part in each.modules() if part is not each}
    layers = [each for each in named if id(each) not in inner]
    if not layers:
        lists = [each for each in decoder.modules() if isinstance(each, nn.ModuleList)]
        alike = [list(each) for each in lists if len({type(layer) for layer in each}) == 1]
        layers = max(alike, key=len, default=[])
    if not layers:
        raise CheckpointError(
            f"transformers does not say which modules of {type(model).__name__} are its layers (_no_split_modules), so "
            "nothing could be gathered layer by layer. Take backend=megatron, or another model."
        )
    return layers


def gathered_apart(model: "PreTrainedModel", head: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP2 gathers separately: the embedding, each layer, and `head`,
    which may replace the model's own LM head.
    All other parameters stay gathered during a whole pass, including a tied embedding, which is
    also the LM head. Raises CheckpointError if transformers does not name the class of the layers.
    """
    layers = layers_of(model)
    _refuse_shared(model, layers)
    embedding = model.get_input_embeddings()
    if any(weight is embedding.weight for weight in head.parameters()):
        return layers
    return [embedding, *layers, head]


def _refuse_shared(model: "PreTrainedModel", layers: list[nn.Module]) -> None:
    """Raises CheckpointError if layers share a parameter, which could not be gathered for each of
    them.
    """
    seen: set[int] = set()
    for layer in layers:
        own = {id(parameter) for parameter in layer.parameters()}
        if own & seen:
            raise CheckpointError(
                f"{type(model).__name__} has layers that share their weights, and each layer is gathered by itself "
                "with backend=fsdp. Take backend=megatron, or another model."
            )
        seen |= own
