"""Fixes latent attention of Megatron-Core 0.16.1 under tensor parallelism and with Transformer
Engine.
"""

from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from rftmega.models.layers.norm import LATENT_EPSILON


def mend_latent_attention(chunk: nn.Module, config: MLATransformerConfig) -> None:
    """Fixes every latent attention of a chunk, before anything else looks at its parameters."""
    for module in chunk.modules():
        if isinstance(module, MLASelfAttention):
            parts = module._modules
            downs = [
                parts[name]
                for name in ("linear_q_down_proj", "linear_kv_down_proj")
                if name in parts
            ]
            ups = [
                parts[name] for name in ("linear_q_up_proj", "linear_kv_up_proj") if name in parts
            ]
            if config.sequence_parallel and isinstance(
                module.linear_kv_down_proj, ColumnParallelLinear
            ):
                _sum_gradients_of_the_shared_key(module)
            for down in downs:
                _count_once(down)
            for up in ups:
                if hasattr(up, "layer_norm_weight"):
                    up.eps = LATENT_EPSILON  # type: ignore[assignment]  # of the norm that Transformer Engine keeps in it


def _count_once(down: Any) -> None:
    """Marks weights that every rank holds whole as no shards.

    Transformer Engine marks every weight as a shard. These it holds whole on every rank: their
    gradients, equal everywhere, would enter the global norm once per rank.
    """
    if not isinstance(down, ColumnParallelLinear):
        down.weight.tensor_model_parallel = False


def _sum_gradients_of_the_shared_key(module: MLASelfAttention) -> None:
    """Sums the gradient of the shared rotary key over ranks.

    Every head attends to that key, so its gradient is a sum over all ranks' heads. Megatron-Core
    0.16.1 gathers a column-parallel `linear_kv_down_proj` itself, and its backward pass then
    includes only this rank's heads. It leaves alone what is gathered here. Without sequence
    parallelism these models, all MoE, are not trained.
    """
    module.linear_kv_down_proj.register_forward_hook(_whole)


def _whole(_: nn.Module, given: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Maps [s, b, (latent + key) / TP] to [s / TP, b, latent + key], as from a linear layer that
    every rank has whole: Megatron then gathers the key along the sequence, which sums in the
    backward pass.
    """
    return scatter_to_sequence_parallel_region(
        gather_from_tensor_model_parallel_region(output[0])
    ), output[1]
