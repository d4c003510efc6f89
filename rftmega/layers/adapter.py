"""An adapter on a linear layer that is split over tensor-parallel ranks: scaling * b a x is added to
what the layer gives (LoRA, arXiv:2106.09685).

A column-parallel layer has `a` whole and its own rows of `b`, a row-parallel one its own columns of
`a` and `b` whole. What one process has whole is no shard: its gradient is counted once, and with
sequence parallelism, where each rank sees its own tokens, summed over the ranks.
"""

from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional as F


class LowRankAdapter(nn.Module):
    """LowRankAdapter holds the two matrices of one layer. [s, b, in] -> [s, b, out]."""

    members: Tensor

    def __init__(
        self,
        weight: Tensor,
        members: Tensor,
        *,
        rank: int,
        scaling: float,
        dropout: float,
        row_parallel: bool,
        sequence_parallel: bool,
        group: Any,
    ):
        """`weight` [out, in] is this process's of the layer. `members` [out, pairs] has a 1 where a
        row belongs to a pair of matrices: q, k and v have one each, and lie in one weight.
        """
        super().__init__()
        out, into = weight.shape
        pairs = members.shape[1]
        self.scaling, self.dropout, self.off = scaling, dropout, False
        self.row_parallel, self.sequence_parallel = row_parallel, sequence_parallel
        self.group = group
        kind: Any = {"dtype": weight.dtype, "device": weight.device}
        self.a = nn.Parameter(torch.zeros(pairs * rank, into, **kind))
        self.b = nn.Parameter(torch.zeros(out, rank, **kind))
        self.one_pair = bool((members == 1).all())
        self.register_buffer("members", members.to(**kind), persistent=False)
        _mark(self.a, 1 if row_parallel else None, sequence_parallel)
        _mark(self.b, None if row_parallel else 0, sequence_parallel)

    def forward(self, given: Tensor) -> Tensor:
        inner = F.linear(self._dropped(given), self.a)
        inner = self._summed(inner) if self.row_parallel else self._for_shards(inner)
        return self.scaling * F.linear(inner, self.by_pair())

    def delta(self, rows: slice, columns: slice) -> Tensor:
        """Returns what is added to rows and columns of the weight, in float32."""
        up, down = self.by_pair()[rows].float(), self.a[:, columns].float()
        return self.scaling * (up @ down)

    def by_pair(self) -> Tensor:
        """Returns b as [out, pairs * rank]: each row where its pair's part of a's rows is."""
        if self.one_pair:
            return self.b
        return (self.members[:, :, None] * self.b[:, None]).flatten(1)

    def _for_shards(self, inner: Tensor) -> Tensor:
        """Returns all tokens' values, whose gradient is a sum over the shards of `b`."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(
                inner, tensor_parallel_output_grad=True, group=self.group
            )
        return copy_to_tensor_model_parallel_region(inner, group=self.group)

    def _summed(self, inner: Tensor) -> Tensor:
        """Returns the sum over the shards of `a`: r columns travel, not those of the layer."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return reduce_from_tensor_model_parallel_region(inner, group=self.group)

    def _dropped(self, given: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return given
        if self.row_parallel or self.sequence_parallel:  # ranks have other columns, or other tokens
            with get_cuda_rng_tracker().fork():
                return F.dropout(given, self.dropout)
        return F.dropout(given, self.dropout)


def _mark(parameter: Any, split: int | None, sequence_parallel: bool) -> None:
    """Tells Megatron along which dimension a parameter is split; None: every rank has it whole."""
    parameter.tensor_model_parallel = split is not None
    parameter.partition_dim = -1 if split is None else split
    parameter.partition_stride = 1
    parameter.sequence_parallel = sequence_parallel and split is None


class AdaptedLinear:
    """AdaptedLinear adds what an adapter gives to what the linear layer that it is mixed into does."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.lora: LowRankAdapter | None = None

    def forward(self, given: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(given, *others, **named)  # type: ignore[misc]
        if self.lora is None or self.lora.off:
            return output, bias
        return output + self.lora(given), bias


@cache
def with_adapter(linear: type) -> type:
    """Returns a class of linear layers that can have an adapter."""
    return type(f"{linear.__name__}WithAdapter", (AdaptedLinear, linear), {})


def let_gradients_begin(embedding: nn.Module) -> None:
    """Makes what a frozen embedding gives require a gradient.

    A layer that is recomputed whole has a gradient only where what it is given has one. Behind a
    frozen embedding no adapter would get any, without a word.
    """
    embedding.register_forward_hook(_requiring_gradient)


def _requiring_gradient(_: nn.Module, given: Any, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output
