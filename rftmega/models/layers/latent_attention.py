"""Fixes multi-head latent attention of Megatron-Core 0.16.1 under tensor parallelism and with
Transformer Engine, and rotates its packed rows by the tokens' positions.
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
from rftmega.models.layers.rotary import PackedRotary


def mend_latent_attention(chunk: nn.Module, config: MLATransformerConfig) -> None:
    """Corrects the gradient of the shared rotary key, the gradient norm and the norms' epsilon of
    every latent-attention module in a pipeline chunk; to be called before other code uses the
    chunk's parameters.
    """
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


def rotate_by_position(chunk: nn.Module, *, by_rows: bool = False) -> list[PackedRotary]:
    """Lets every latent-attention module of a pipeline chunk rotate all packed rows at once, by the
    positions of their tokens; returns the modules to which the positions are told. `by_rows`: as in
    PackedRotary.
    """
    found = []
    for module in chunk.modules():
        if isinstance(module, MLASelfAttention):
            table: Any = module.rotary_pos_emb
            module.rotary_pos_emb = PackedRotary(table, by_rows=by_rows)
            found.append(module.rotary_pos_emb)
    return found


def _count_once(down: Any) -> None:
    """Marks Transformer Engine's down projections as not split over ranks.

    Transformer Engine marks every weight as a shard, although every rank holds these weights in
    full: their gradients, equal on all ranks, would count once per rank in the global norm.
    """
    if not isinstance(down, ColumnParallelLinear):
        down.weight.tensor_model_parallel = False


def _sum_gradients_of_the_shared_key(module: MLASelfAttention) -> None:
    """Sums the gradient of the rotary key that all heads share over tensor-parallel ranks.

    Each rank computes the gradient from its own heads only. Megatron-Core 0.16.1 gathers the output
    of a column-parallel `linear_kv_down_proj` without summing gradients in the backward pass. The
    hook `_whole` changes the output so that Megatron gathers it with summed gradients. The fix
    needs sequence parallelism; without it these models, all of them MoE, are not trained.
    """
    module.linear_kv_down_proj.register_forward_hook(_whole)


def _whole(_: nn.Module, given: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Maps [s, b, (latent + key) / TP] to [s / TP, b, latent + key], the output of a linear layer
    that every rank holds in full: Megatron then gathers the key along the sequence, and its
    backward pass sums the gradients.
    """
    return scatter_to_sequence_parallel_region(
        gather_from_tensor_model_parallel_region(output[0])
    ), output[1]
