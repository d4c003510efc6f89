"""Describes tensors of a folder that stack one matrix of every expert.

Qwen3-VL's MoE models are published this way: the matrices are transposed, [experts, in, out], with
gate and up concatenated along out. transformers 5 writes them untransposed, [experts, out, in].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """Stack describes one tensor of a folder that concatenates matrices of all experts of a layer,
    and lists the names that these matrices have as separate tensors.
    """

    name: str
    matrices: tuple[tuple[str, ...], ...]  # of each expert, in their order along out
    shape: tuple[int, int]  # [out, in] of each matrix

    @property
    def published(self) -> tuple[int, int, int]:
        out, inputs = self.shape
        return len(self.matrices), inputs, out * len(self.matrices[0])

    @property
    def untransposed(self) -> tuple[int, int, int]:
        experts, inputs, out = self.published
        return experts, out, inputs

    def places(self, *, transposed: bool) -> Iterator[tuple[str, "Place"]]:
        """Yields (name, Place) for every matrix in the stack: its name as a separate tensor, and
        its position.

        `transposed`: the folder has the published layout, whose matrices are transposed.
        """
        for expert, names in enumerate(self.matrices):
            for number, name in enumerate(names):
                yield name, Place(self, expert, number * self.shape[0], transposed)


class Place(NamedTuple):
    """Place is the position of one expert's matrix in a stacked tensor."""

    stack: Stack
    expert: int
    start: int  # along out
    transposed: bool

    def of(self, matrices: Tensor) -> Tensor:
        """Returns the matrix [out, in] as a view of `matrices`, the slice of the stacked tensor
        that belongs to the matrix's expert.
        """
        own = matrices.T if self.transposed else matrices
        return own.narrow(0, self.start, self.stack.shape[0])
