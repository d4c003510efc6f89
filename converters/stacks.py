"""Describes tensors of a folder that stack one matrix, or one bias, of every expert.

Qwen3-VL's MoE models are published this way: the matrices are transposed, [experts, in, out], with
gate and up concatenated along out. transformers 5 writes them untransposed, [experts, out, in].
gpt-oss's are always transposed, and gate and up alternate along out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """Stack describes one tensor of a folder that joins matrices or biases of all experts of a
    layer, and lists the names that these have as separate tensors.
    """

    name: str
    matrices: tuple[tuple[str, ...], ...]  # of each expert, in their order along out
    shape: tuple[int, ...]  # [out, in] of each matrix, [out] of each bias
    alternating: bool = False  # along out, an element of each in turn, instead of all of each
    always_transposed: bool = False  # there is no folder with untransposed matrices

    @property
    def published(self) -> tuple[int, ...]:
        out, *inputs = self.shape
        return len(self.matrices), *inputs, out * len(self.matrices[0])

    @property
    def untransposed(self) -> tuple[int, ...]:
        if self.always_transposed:
            return self.published
        experts, *inputs, out = self.published
        return experts, out, *inputs

    def places(self, *, transposed: bool) -> Iterator[tuple[str, "Place"]]:
        """Yields (name, Place) for every matrix in the stack: its name as a separate tensor, and
        its position.

        `transposed`: the folder has the published layout, whose matrices are transposed.
        """
        for expert, names in enumerate(self.matrices):
            for number, name in enumerate(names):
                yield name, Place(self, expert, number, transposed and len(self.shape) > 1)


class Place(NamedTuple):
    """Place is the position of one expert's matrix, or bias, in a stacked tensor."""

    stack: Stack
    expert: int
    number: int  # among the expert's matrices in the stack
    transposed: bool

    def of(self, matrices: Tensor) -> Tensor:
        """Returns the matrix [out, in], or the bias [out], as a view of `matrices`, the slice of
        the stacked tensor that belongs to its expert.
        """
        own = matrices.T if self.transposed else matrices
        return own[self.along_out(0, self.stack.shape[0])]

    def along_out(self, start: int, stop: int) -> slice:
        """Returns where rows `start` to `stop` of the matrix are along the stacked tensor's out."""
        out, number = self.stack.shape[0], self.number
        if self.stack.alternating:
            step = len(self.stack.matrices[0])
            return slice(step * start + number, step * stop, step)
        return slice(number * out + start, number * out + stop)
