"""Gradients of latent attention's shared key under tensor parallelism."""

from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn


def sum_gradients_of_the_shared_key(chunk: nn.Module, config: MLATransformerConfig) -> None:
    """Every head attends to one rotated key, so its gradient is a sum over all ranks' heads. Megatron-Core 0.16.1 gathers a
    column-parallel `linear_kv_down_proj` itself, and its backward pass then takes only this rank's heads into account. What is
    gathered here it leaves alone. Without sequence parallelism these models, all of experts, are not trained.
    """
    if config.sequence_parallel:
        for module in chunk.modules():
            if isinstance(module, MLASelfAttention) and isinstance(module.linear_kv_down_proj, ColumnParallelLinear):
                module.linear_kv_down_proj.register_forward_hook(_whole)


def _whole(_: nn.Module, given: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """[s, b, (latent + key) / TP] -> [s / TP, b, latent + key], as from a linear that every rank has whole: Megatron gathers the
    key along the sequence then, which sums in the backward pass.
    """
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(output[0])), output[1]
