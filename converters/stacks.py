"""Tensors of a folder that stack a matrix of every expert.

Qwen3-VL's MoE models are published this way: the matrices are transposed, [experts, in, out], with
gate and up side by side along out. transformers 5 writes them untransposed, [experts, out, in].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """Stack is one such tensor of a folder and the names of its matrices."""

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
        """Yields the name and the place of every matrix."""
        for expert, names in enumerate(self.matrices):
            for number, name in enumerate(names):
                yield name, Place(self, expert, number * self.shape[0], transposed)


class Place(NamedTuple):
    """Place is the position of a matrix in a stack."""

    stack: Stack
    expert: int
    start: int  # along out
    transposed: bool

    def of(self, matrices: Tensor) -> Tensor:
        """Returns the matrix, [out, in], as a view of the expert's slice of the stack."""
        own = matrices.T if self.transposed else matrices
        return own.narrow(0, self.start, self.stack.shape[0])
