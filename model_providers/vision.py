"""A decoder of Megatron's that sees: transformers' vision tower on its first stage.

The tower is replicated over tensor- and context-parallel processes. What reaches its output on the
way back is complete on every tensor-parallel process, so nothing is reduced over them; under context
parallelism it is of this process's tokens, and Megatron's data-parallel reduction, which includes
the context-parallel processes, adds up the shares.
"""

import importlib
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from model_providers.description import ModelDescription

# family -> module of transformers, its class of the tower, and that of its configuration
TOWERS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
    ),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig"),
}


def build_tower(model: ModelDescription, dtype: torch.dtype) -> nn.Module:
    """Builds the tower of transformers, whose weights hold nothing yet."""
    from transformers.initialization import no_init_weights

    assert model.tower is not None
    module, kind, config_kind = TOWERS[model.family]
    home = f"transformers.models.{module}"
    config = getattr(importlib.import_module(f"{home}.configuration_{module}"), config_kind)
    tower = getattr(importlib.import_module(f"{home}.modeling_{module}"), kind)
    with no_init_weights():  # a large tower's would take minutes, and a checkpoint has them
        built: nn.Module = tower._from_config(config(**model.tower.fields), dtype=dtype)
    return built


class DeepstackLayer(TransformerLayer):
    """DeepstackLayer adds the tower's features of its own number to what it gives (Qwen3-VL).

    They come as `context` [layers fed, n, 1, H], for which a decoder without cross-attention has no
    other use. An argument, unlike what a hook remembers, is an input of Megatron's checkpointed
    forward: it is there when a layer is computed again, of the right micro-batch, and has a
    gradient.
    """

    def forward(self, *args: Any, context: Any = None, **named: Any) -> Any:
        hidden, context = super().forward(*args, context=context, **named)
        if context is not None and self.layer_number <= len(context):
            hidden = hidden + context[self.layer_number - 1]
        return hidden, context


class VisionLanguageModel(GPTModel):
    """VisionLanguageModel is one pipeline chunk; the first has `visual`."""

    def __init__(self, *args: Any, tower: nn.Module | None, frozen: bool, **named: Any):
        """`frozen`: the tower has no gradient."""
        super().__init__(*args, scatter_embedding_sequence_parallel=False, **named)
        self.frozen = frozen
        if tower is not None:
            self.visual = tower.requires_grad_(not frozen)
            if self.config.recompute_granularity == "full" and not frozen:
                tower.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

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

        The first chunk gets `pixels` [P, C], the pictures' patches, and `grids` [I, 3] (or None,
        where the micro-batch has no picture), and `features` [N]: which row of the tower's output
        stands in the token's place, from 1; 0 for words.
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

    def _scattered(self, hidden: Tensor) -> Tensor:
        """Returns this process's part under sequence parallelism."""
        if not self.config.sequence_parallel:
            return hidden
        scattered: Tensor = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
        return scattered

    def _nothing(self) -> Tensor:
        """Returns 0, made of all of the tower's parameters: a data-parallel reduction that overlaps
        the backward pass waits until each of them has a gradient.
        """
        firsts = [parameter.flatten()[:1] for parameter in self.visual.parameters()]
        return 0.0 * torch.cat(firsts).sum()
