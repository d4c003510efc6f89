"""Constant factors of embedding, attention, MLP and logits, as in Granite (arXiv:2405.04324)
and Gemma.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class ScaledOutput:
    """ScaledOutput is a mixin that multiplies the output of a linear layer by `factor`."""

    factor: float

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(given)  # type: ignore[misc]
        return output * self.factor, bias


@cache
def with_factor(linear: type, factor: float) -> type:
    """Returns a subclass of a linear layer that multiplies its output by `factor`."""
    return type(f"{linear.__name__}Scaled", (ScaledOutput, linear), {"factor": factor})


def scale_output(module: nn.Module, factor: float, *, rounded: bool = False) -> None:
    """Multiplies what a module returns, one tensor, by `factor`; `rounded`: by the factor rounded
    to the tensor's dtype.
    """

    def scaled(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
        return output * (float(torch.tensor(factor, dtype=output.dtype)) if rounded else factor)

    module.register_forward_hook(scaled)
