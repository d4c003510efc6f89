"""Vision-language models: a Megatron decoder with transformers' vision encoder on its first
pipeline stage.
"""

import importlib
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from rftmega.model_providers.description import ModelDescription
from rftmega.model_providers.tower import VisionTower
from rftmega.model_providers.tower_model import TowerModel

# model_type -> transformers' module, and its classes of the vision encoder and the config
TOWERS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
    ),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig"),
    "qwen3_5": ("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig"),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeVisionModel", "Qwen3_5MoeVisionConfig"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig"),
}


def build_tower(model: ModelDescription, dtype: torch.dtype) -> nn.Module:
    """Builds transformers' vision encoder with uninitialised weights."""
    from transformers.initialization import no_init_weights

    assert isinstance(model.tower, VisionTower)
    module, kind, config_kind = TOWERS[model.family]
    home = f"transformers.models.{module}"
    config = getattr(importlib.import_module(f"{home}.configuration_{module}"), config_kind)
    tower = getattr(importlib.import_module(f"{home}.modeling_{module}"), kind)
    with no_init_weights():  # initialising takes minutes; a checkpoint has the weights
        built: nn.Module = tower._from_config(config(**model.tower.fields), dtype=dtype)
    return built


class DeepstackLayer(TransformerLayer):
    """DeepstackLayer is a decoder layer that adds vision features to its output; the vision encoder
    returns separate features for each of the first decoder layers (DeepStack, Qwen3-VL).

    The features are passed as `context` [number of such layers, n, 1, H], which a decoder without
    cross-attention does not use otherwise. Unlike state kept by a hook, an argument is an input of
    Megatron's checkpointed forward: it is available when a layer is recomputed, belongs to the
    right micro-batch, and gets a gradient.
    """

    def forward(self, *args: Any, context: Any = None, **named: Any) -> Any:
        hidden, context = super().forward(*args, context=context, **named)
        if context is not None and self.layer_number <= len(context):
            hidden = hidden + context[self.layer_number - 1]
        return hidden, context


class VisionLanguageModel(TowerModel):
    """VisionLanguageModel is one pipeline chunk of a vision-language model; the first chunk
    contains the vision encoder as `visual`.
    """

    place = "visual"

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        features: Tensor | None = None,
        pixels: Tensor | None = None,
        grids: Tensor | None = None,
    ) -> Any:
        """Runs the chunk over packed tokens [1, N].

        The first chunk takes the patches `pixels` [P, C] of all images and the number of patches of
        each image along time, height and width, `grids` [I, 3] (both None if the micro-batch has no
        image), and `features` [N]: the 1-based index of the encoder output that replaces the
        token's embedding, 0 for text tokens.
        """
        if not self.pre_process:
            return super().forward(
                input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params
            )
        embedded = self.embedding(input_ids=input_ids, position_ids=None)  # [N, 1, H]
        context = None
        if pixels is not None:
            assert features is not None
            with torch.no_grad() if self.frozen else nullcontext():
                seen = self.visual(pixels.to(self.config.params_dtype), grid_thw=grids)
            here = (features > 0)[:, None, None]
            rows = (features - 1).clamp(min=0)
            embedded = torch.where(
                here, seen.pooler_output[rows, None].to(embedded.dtype), embedded
            )
            deep = [
                torch.where(here, fed[rows, None].to(embedded.dtype), 0.0)
                for fed in getattr(seen, "deepstack_features", None) or []
            ]
            if deep:
                context = torch.stack([self._scattered(fed) for fed in deep])
        elif not self.frozen and torch.is_grad_enabled():
            embedded = embedded + self._nothing().to(embedded.dtype)
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=self._scattered(embedded),
            packed_seq_params=packed_seq_params,
            extra_block_kwargs={"context": context},
        )
