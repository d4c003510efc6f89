"""Counts the weights of a decoder of transformers, as it was built."""

from transformers import PreTrainedModel

from rftmega.hf_folders.decoder import TransformersModel, describe_any

EXPERT_DIMENSIONS = 3  # of the parameters that transformers fuses experts into


def describe(model: PreTrainedModel) -> TransformersModel:
    """Describes a model that was built, on the meta device or not."""
    said = describe_any(model.config)
    outside = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    share = said.experts.active / said.experts.number if said.experts else 1.0
    counted, matrices = 0, 0.0
    for parameter in model.parameters():
        counted += parameter.numel()
        if parameter.dim() > 1 and id(parameter) not in outside:
            fused = parameter.dim() == EXPERT_DIMENSIONS
            matrices += parameter.numel() * (share if fused else 1.0)
    return said.with_weights(counted, round(matrices))
