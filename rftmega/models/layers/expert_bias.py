"""Biases of the second linear layer of experts, as in gpt-oss."""

from functools import cache
from typing import Any

from torch import Tensor


class ExpertBias:
    """ExpertBias is a mixin for the second linear layer of one expert, or of all of a process.

    Megatron-Core 0.16 marks its biases like those of a dense layer, so that their gradients would
    be summed over the tensor-parallel ranks, and only those of the first rank would count in the
    gradient norm. But each rank has whole experts of its own. Without Transformer Engine, Megatron
    also adds the bias in place to the output, which autograd refuses for a view.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        for name, parameter in self.named_parameters(recurse=False):  # type: ignore[attr-defined]
            if name.startswith("bias"):
                parameter.sequence_parallel = False
                parameter.tensor_model_parallel = True

    def forward(self, *given: Any) -> tuple[Tensor, Any]:
        output, bias = super().forward(*given)  # type: ignore[misc]
        return output.clone() if isinstance(bias, Tensor) else output, bias


@cache
def with_expert_bias(linear: type) -> type:
    """Returns a subclass of the second linear layer of experts whose biases are trained rightly."""
    return type(f"{linear.__name__}WithBias", (ExpertBias, linear), {})
