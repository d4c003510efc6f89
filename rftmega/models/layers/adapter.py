"""An adapter on a linear layer that is split over tensor-parallel ranks: scaling * b a x is added to
what the layer gives (LoRA, arXiv:2106.09685).

A column-parallel layer has `a` whole and its own rows of `b`, a row-parallel one its own columns of
`a` and `b` whole. What one process has whole is no shard: its gradient is counted once, and with
sequence parallelism, where each rank sees its own tokens, summed over the ranks.

An expert's layers talk to nobody: the dispatcher gives all processes that share an expert the same
tokens, and adds up what they give.
"""

from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
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
        of_expert: bool,
        group: Any,
    ):
        """`weight` [out, in] is this process's of the layer. `members` [out, pairs] has a 1 where a
        row belongs to a pair of matrices: q, k and v have one each, and lie in one weight. `group`:
        the processes that share the layer.
        """
        super().__init__()
        out, into = weight.shape
        pairs = members.shape[1]
        self.scaling, self.dropout, self.off = scaling, dropout, False
        self.row_parallel, self.sequence_parallel = row_parallel, sequence_parallel
        self.of_expert, self.group = of_expert, group
        kind: Any = {"dtype": weight.dtype, "device": weight.device}
        self.a = nn.Parameter(torch.zeros(pairs * rank, into, **kind))
        self.b = nn.Parameter(torch.zeros(out, rank, **kind))
        self.one_pair = bool((members == 1).all())
        self.register_buffer("members", members.to(**kind), persistent=False)
        split = (1, None) if row_parallel else (None, 0)
        for matrix, dimension in zip((self.a, self.b), split, strict=True):
            if of_expert:
                _mark_of_expert(matrix, dimension, weight, group)
            else:
                _mark(matrix, dimension, sequence_parallel)

    def forward(self, given: Tensor) -> Tensor:
        if self.of_expert:
            return self._of_all_tokens(given)
        inner = F.linear(self._dropped(given), self.a)
        inner = self._summed(inner) if self.row_parallel else self._for_shards(inner)
        return self.scaling * F.linear(inner, self.by_pair())

    def _of_all_tokens(self, given: Tensor) -> Tensor:
        """Returns this process's part of an expert's sum, or its rows.

        Tokens and sums are the dispatcher's, in both directions. What is left to do is to sum the
        gradient of the matrix that every process has whole.
        """
        a, b = self.a, self.by_pair()
        if self.row_parallel:
            b = copy_to_tensor_model_parallel_region(b, group=self.group)
        else:
            a = copy_to_tensor_model_parallel_region(a, group=self.group)
        return self.scaling * F.linear(F.linear(self._dropped(given), a), b)

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
        if self.of_expert:  # how many tokens a process has is its own, and so is how often it draws
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                return F.dropout(given, self.dropout)
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


def _mark_of_expert(parameter: Any, split: int | None, weight: Any, group: Any) -> None:
    """Tells Megatron that a parameter is an expert's: its gradient is summed where the weight's is.

    The norm of gradients counts what is split wherever it is, and what is not split where the rank
    among the shards of dense layers is 0, which some experts are on no process of. So every matrix
    is said to be split, and the copies of a whole one to be shared, which are not counted.
    """
    parameter.allreduce = getattr(weight, "allreduce", True)
    parameter.tensor_model_parallel, parameter.sequence_parallel = True, False
    parameter.partition_dim = -1 if split is None else split
    parameter.partition_stride = 1
    parameter.shared = split is None and group.rank() > 0


class AdaptedLinear:
    """AdaptedLinear adds what an adapter gives to what the linear layer that it is mixed into does."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.lora: LowRankAdapter | None = None

    def adaptable(self) -> list[Tensor]:
        """Returns the weights that can have an adapter."""
        return [self.weight]  # type: ignore[attr-defined]

    def adapt(self, number: int, adapter: LowRankAdapter) -> None:
        """Puts an adapter beside one of `adaptable`."""
        self.lora = adapter

    def forward(self, given: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(given, *others, **named)  # type: ignore[misc]
        if self.lora is None or self.lora.off:
            return output, bias
        return output + self.lora(given), bias


class AdaptedExperts:
    """AdaptedExperts adds what the adapters of experts give to what the layer of all of them does
    that it is mixed into: one whose tokens lie expert by expert, as Transformer Engine's grouped one.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.lora = nn.ModuleDict()

    def adaptable(self) -> list[Tensor]:
        """Returns the weights that can have an adapter."""
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]  # type: ignore[attr-defined]

    def adapt(self, number: int, adapter: LowRankAdapter) -> None:
        """Puts an adapter beside one of `adaptable`."""
        self.lora[str(number)] = adapter

    def forward(
        self, given: Tensor, tokens: list[int], *others: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`tokens`: of each expert."""
        output, bias = super().forward(given, tokens, *others, **named)  # type: ignore[misc]
        if not self.lora or any(adapter.off for adapter in self.lora.values()):
            return output, bias
        parts = enumerate(given.split(list(tokens)))
        return output + torch.cat([self.lora[str(number)](part) for number, part in parts]), bias


@cache
def with_adapter(linear: type) -> type:
    """Returns a class of linear layers that can have an adapter."""
    return type(f"{linear.__name__}WithAdapter", (AdaptedLinear, linear), {})


@cache
def with_adapters(grouped: type) -> type:
    """Returns a class of layers of all experts, each of which can have an adapter."""
    return type(f"{grouped.__name__}WithAdapters", (AdaptedExperts, grouped), {})


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
