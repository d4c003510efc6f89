"""Norms after attention and after the MLP, before the residual is added, as in OLMo 2
(arXiv:2501.00656).
Megatron-Core 0.16 has norms before both modules only. The last layer of each is row-parallel and
sums over the tensor-parallel ranks, so every rank has complete vectors to normalise afterwards.
"""

from functools import cache
from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rftmega.models.layers.norm import RMSNorm


class NormBehind:
    """NormBehind is a mixin that normalises the output of a linear layer."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **given: Any
    ):
        super().__init__(input_size, output_size, config=config, **given)  # type: ignore[call-arg]
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(given)  # type: ignore[misc]
        return self.post_layernorm(output), bias


@cache
def with_norm_behind(linear: type) -> type:
    """Returns a subclass of a row-parallel layer that normalises its output."""
    return type(f"{linear.__name__}WithNorm", (NormBehind, linear), {})
