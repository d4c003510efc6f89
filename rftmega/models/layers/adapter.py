"""LoRA adapters (arXiv:2106.09685) on linear layers that are split over tensor-parallel ranks:
scaling * b a x is added to the layer's output.
For a column-parallel layer every rank holds all of `a` and its own rows of `b`; for a row-parallel
layer its own columns of `a` and all of `b`. A matrix that every rank holds in full is not marked as
a shard: its gradient counts once in the norm and, under sequence parallelism, where each rank sees
its own tokens, is summed over the ranks. Adapters of an expert's layers do not communicate: the
token dispatcher gives all processes that share an expert the same tokens, and sums their outputs.
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
    """LowRankAdapter holds the two matrices of a layer's adapter and maps [s, b, in] to [s, b,
    out].
    """

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
        """Creates the adapter with zero matrices.

        `weight` [out, in] is this process's part of the layer's weight. `members` [out, pairs] has
        a 1 where a row belongs to a LoRA pair: q, k and v have one pair each, although they are
        rows of one weight. `of_expert`: the layer belongs to an MoE expert. `group`: the
        tensor-parallel processes over which the layer is split.
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
        """Returns, for an expert's tokens `given` [n, in], this process's partial sum
        (row-parallel) or its output rows (column-parallel) of the expert's adapter.

        The dispatcher exchanges tokens and sums outputs in both directions. Only the gradient of
        the matrix that every process holds in full must be summed here.
        """
        a, b = self.a, self.by_pair()
        if self.row_parallel:
            b = copy_to_tensor_model_parallel_region(b, group=self.group)
        else:
            a = copy_to_tensor_model_parallel_region(a, group=self.group)
        return self.scaling * F.linear(F.linear(self._dropped(given), a), b)

    def delta(self, rows: slice, columns: slice) -> Tensor:
        """Returns scaling * b a for the given rows and columns of the weight, in float32."""
        up, down = self.by_pair()[rows].float(), self.a[:, columns].float()
        return self.scaling * (up @ down)

    def by_pair(self) -> Tensor:
        """Returns b as [out, pairs * rank]: each row's values are in the columns of its pair, with
        zeros elsewhere.
        """
        if self.one_pair:
            return self.b
        return (self.members[:, :, None] * self.b[:, None]).flatten(1)

    def _for_shards(self, inner: Tensor) -> Tensor:
        """Returns the products `inner` = a x of all tokens, gathered under sequence parallelism;
        their gradient is summed over the ranks that hold shards of `b`.
        """
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(
                inner, tensor_parallel_output_grad=True, group=self.group
            )
        return copy_to_tensor_model_parallel_region(inner, group=self.group)

    def _summed(self, inner: Tensor) -> Tensor:
        """Returns the products `inner` = a x, of which each rank has a partial sum, summed over the
        ranks that hold shards of `a`; this sends only `rank` values per token.
        """
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return reduce_from_tensor_model_parallel_region(inner, group=self.group)

    def _dropped(self, given: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return given
        if self.of_expert:  # each process draws for its own number of tokens
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                return F.dropout(given, self.dropout)
        if self.row_parallel or self.sequence_parallel:  # ranks have other columns, or other tokens
            with get_cuda_rng_tracker().fork():
                return F.dropout(given, self.dropout)
        return F.dropout(given, self.dropout)


def _mark(parameter: Any, split: int | None, sequence_parallel: bool) -> None:
    """Sets Megatron's attributes for a parameter of a tensor-parallel layer; `split` is the
    dimension along which the parameter is split over the ranks, None if every rank holds all of it.
    """
    parameter.tensor_model_parallel = split is not None
    parameter.partition_dim = -1 if split is None else split
    parameter.partition_stride = 1
    parameter.sequence_parallel = sequence_parallel and split is None


def _mark_of_expert(parameter: Any, split: int | None, weight: Any, group: Any) -> None:
    """Sets Megatron's attributes for a parameter of an expert's adapter: its gradient is summed
    over the same processes as that of the expert's weight.
    Megatron's gradient norm counts split parameters on every process, and others only on processes
    with tensor-parallel rank 0; some experts are on no such process. So every matrix is marked as
    split, and the copies of a replicated matrix beyond the first as shared, which are not counted.
    """
    parameter.allreduce = getattr(weight, "allreduce", True)
    parameter.tensor_model_parallel, parameter.sequence_parallel = True, False
    parameter.partition_dim = -1 if split is None else split
    parameter.partition_stride = 1
    parameter.shared = split is None and group.rank() > 0


class AdaptedLinear:
    """AdaptedLinear is a mixin for linear layers that adds the output of a LoRA adapter to that of
    the layer.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.lora: LowRankAdapter | None = None

    def adaptable(self) -> list[Tensor]:
        """Returns the layer's weights that can have an adapter: its only weight."""
        return [self.weight]  # type: ignore[attr-defined]

    def adapt(self, number: int, adapter: LowRankAdapter) -> None:
        """Attaches an adapter to the layer's weight; `number` is its index in `adaptable`, always
        0.
        """
        self.lora = adapter

    def forward(self, given: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(given, *others, **named)  # type: ignore[misc]
        if self.lora is None or self.lora.off:
            return output, bias
        return output + self.lora(given), bias


class AdaptedExperts:
    """AdaptedExperts is a mixin for grouped linear layers, whose tokens are sorted by expert, such
    as Transformer Engine's; it adds the output of each expert's adapter to that of the layer.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.lora = nn.ModuleDict()

    def adaptable(self) -> list[Tensor]:
        """Returns the layer's weights that can have an adapter: one for each expert."""
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]  # type: ignore[attr-defined]

    def adapt(self, number: int, adapter: LowRankAdapter) -> None:
        """Attaches an adapter to the weight of expert `number`, its index in `adaptable`."""
        self.lora[str(number)] = adapter

    def forward(
        self, given: Tensor, tokens: list[int], *others: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer with its adapters; `tokens` lists the number of tokens of each expert."""
        output, bias = super().forward(given, tokens, *others, **named)  # type: ignore[misc]
        if not self.lora or any(adapter.off for adapter in self.lora.values()):
            return output, bias
        parts = enumerate(given.split(list(tokens)))
        return output + torch.cat([self.lora[str(number)](part) for number, part in parts]), bias


@cache
def with_adapter(linear: type) -> type:
    """Returns a subclass of a linear layer class that can have a LoRA adapter."""
    return type(f"{linear.__name__}WithAdapter", (AdaptedLinear, linear), {})


@cache
def with_adapters(grouped: type) -> type:
    """Returns a subclass of a grouped linear layer class in which each expert can have a LoRA
    adapter.
    """
    return type(f"{grouped.__name__}WithAdapters", (AdaptedExperts, grouped), {})


def let_gradients_begin(embedding: nn.Module) -> None:
    """Makes a frozen embedding's output require a gradient.

    A layer under full gradient checkpointing computes gradients only if its input requires one.
    After a frozen embedding, adapters would silently get none.
    """
    embedding.register_forward_hook(_requiring_gradient)


def _requiring_gradient(_: nn.Module, given: Any, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output
