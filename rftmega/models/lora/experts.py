"""LoRA adapters on MoE experts that lie in one tensor per layer.

The layer's own forward pass takes each expert's matrix out of that tensor and multiplies tokens
with it. While it runs, a stand-in replaces the tensor, and adds the products of the expert's pairs:
the sum of a matrix and its delta is never materialised, and frozen experts have no gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rftmega.config import LoRA
from rftmega.core.shards import Box, shape_of
from rftmega.models.lora.dropped import dropped


class PairsOfExperts(nn.Module):
    """PairsOfExperts holds a LoRA pair for each expert of a layer, beside one of its matrices."""

    def __init__(self, experts: int, rows: int, columns: int, options: LoRA):
        """Creates the pairs on the meta device."""
        super().__init__()
        with torch.device("meta"):
            self.lora_A = nn.Parameter(torch.empty(experts, options.rank, columns))
            self.lora_B = nn.Parameter(torch.empty(experts, rows, options.rank))
        self.width, self.scaling, self.dropout = columns, options.scaling, options.dropout
        self.columns: slice | None = None  # columns of x that this process has; None: all

    def product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns the product [N, rows] of an expert's pair and its tokens x [N, in]."""
        if self.training and self.dropout:
            x = dropped(x, self.dropout, width=self.width, columns=self.columns)
        return self.scaling * functional.linear(functional.linear(x, a), b)


class MatrixWithPairs:
    """MatrixWithPairs stands in for an expert's matrix, as the weight of a linear layer alone."""

    def __init__(self, weight: Tensor, products: Sequence[Callable[[Tensor], Tensor] | None]):
        """Takes the `products` of the matrices stacked in the weight; None: it has no pair."""
        self.weight, self.products = weight, products

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Sequence[Any] = (), named: Any = None
    ) -> Tensor:
        if function is not functional.linear or len(given) < 2 or not isinstance(given[1], cls):
            raise TypeError(
                f"The forward pass of this model's experts calls {function} with their weights, and adapters on experts know "
                "torch.nn.functional.linear alone. Leave experts out of model.lora.targets, or take backend=megatron."
            )
        x, matrix, *bias = given
        completion = functional.linear(x, matrix.weight, *bias, **(named or {}))
        return completion + matrix._sums(x)

    def _sums(self, x: Tensor) -> Tensor:
        rows = len(self.weight) // len(self.products)
        nothing = x.new_zeros(*x.shape[:-1], rows)
        return torch.cat([nothing if of is None else of(x) for of in self.products], dim=-1)


class StackWithPairs:
    """StackWithPairs stands in for the fused tensor of a layer's experts [E, rows, columns]."""

    def __init__(self, stack: Tensor, parts: Sequence[PairsOfExperts | None]):
        self.stack, self.parts = stack, parts
        # unbound once, so that a backward pass assembles each gradient once
        self.pairs = [
            None if part is None else (part.lora_A.unbind(), part.lora_B.unbind()) for part in parts
        ]

    def __getitem__(self, expert: int | Tensor) -> MatrixWithPairs:
        products = [self._product(number, int(expert)) for number in range(len(self.parts))]
        return MatrixWithPairs(self.stack[expert], products)

    def _product(self, number: int, expert: int) -> Callable[[Tensor], Tensor] | None:
        part, pairs = self.parts[number], self.pairs[number]
        if part is None or pairs is None:
            return None
        a, b = pairs[0][expert], pairs[1][expert]
        return lambda x: part.product(x, a, b)


@dataclass(frozen=True, slots=True)
class StackDelta:
    """StackDelta is the delta of the pairs on one expert's matrix: a `shards.Addend`."""

    pairs: Sequence[tuple[Tensor, Tensor] | None]  # A and B of the stacked matrices
    rows: int  # of each matrix
    scaling: float

    @torch.no_grad()
    def of(self, box: Box) -> Tensor:
        (start, stop), columns = box
        number = start // self.rows
        first = number * self.rows
        assert stop <= first + self.rows, f"{box} has rows of two matrices"
        pair = self.pairs[number]
        if pair is None:
            return torch.zeros(shape_of(box))
        down, up = pair[0][:, slice(*columns)], pair[1][start - first : stop - first]
        return self.scaling * (up.float() @ down.float())
