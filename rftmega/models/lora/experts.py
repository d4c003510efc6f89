"""LoRA adapters on MoE experts whose matrices are stacked in one tensor per layer.

The layer's own forward pass indexes the stacked tensor by expert and multiplies tokens with the
matrix. During that pass an object replaces the tensor, and adds the products of the expert's LoRA
pairs: the sum of a matrix and its delta is never materialised, and frozen experts get no gradient.
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
    """PairsOfExperts holds, for one of a layer's matrices such as gate_proj, the LoRA pair of each
    expert.
    """

    def __init__(self, experts: int, rows: int, columns: int, options: LoRA):
        """Creates the LoRA pairs of `experts` matrices [rows, columns] on the meta device."""
        super().__init__()
        with torch.device("meta"):
            self.lora_A = nn.Parameter(torch.empty(experts, options.rank, columns))
            self.lora_B = nn.Parameter(torch.empty(experts, rows, options.rank))
        self.width, self.scaling, self.dropout = columns, options.scaling, options.dropout
        self.columns: slice | None = None  # columns of x that this process has; None: all

    def product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns scaling * x a.T b.T [N, rows] for an expert's tokens x [N, in] and its pair (a,
        b).
        """
        if self.training and self.dropout:
            x = dropped(x, self.dropout, width=self.width, columns=self.columns)
        return self.scaling * functional.linear(functional.linear(x, a), b)


class MatrixWithPairs:
    """MatrixWithPairs replaces one expert's matrix; it can only be used as the weight of
    `functional.linear`.
    """

    def __init__(self, weight: Tensor, products: Sequence[Callable[[Tensor], Tensor] | None]):
        """Stores the weight and its `products`: for each matrix stacked in the weight a function
        that returns the product of tokens with the matrix's LoRA pair, or None if the matrix has no
        pair.
        """
        self.weight, self.products = weight, products

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Sequence[Any] = (), named: Any = None
    ) -> Tensor:
        if function is not functional.linear or len(given) < 2 or not isinstance(given[1], cls):
            raise TypeError(
                f"The forward pass of this model's experts calls {function} with their weights, and adapters on experts know "
                "torch.nn.functional.linear alone. Leave experts out of model.lora.targets."
            )
        x, matrix, *bias = given
        completion = functional.linear(x, matrix.weight, *bias, **(named or {}))
        return completion + matrix._sums(x)

    def _sums(self, x: Tensor) -> Tensor:
        rows = len(self.weight) // len(self.products)
        nothing = x.new_zeros(*x.shape[:-1], rows)
        return torch.cat([nothing if of is None else of(x) for of in self.products], dim=-1)


class StackWithPairs:
    """StackWithPairs replaces the stacked tensor of a layer's experts [E, rows, columns]; indexing
    it returns the MatrixWithPairs of an expert.
    """

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
    """StackDelta is the delta that LoRA pairs add to one expert's (stacked) matrix, in a form
    (`shards.Addend`) that is added when a shard of the matrix is read.
    """

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
