"""Self-attention whose output is gated (arXiv:2505.06708), with fewer key-value heads than
tensor-parallel ranks.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor


class OutputGate:
    """OutputGate is a mixin for Megatron's self-attention that multiplies the output by the sigmoid
    of a gate.

    With fewer key-value heads than ranks, several ranks compute the queries and gates of one such
    head and each takes its own queries; Megatron-Core 0.16 forgets to take its own gates.
    """

    pg_collection: Any

    def _apply_output_gate(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Returns the gated output [tokens, batch, heads * d] of this rank; `gate` [tokens, batch,
        heads or more, d].
        """
        mine = attended.shape[-1] // gate.shape[-1]
        shares = gate.shape[-2] // mine
        first = self.pg_collection.tp.rank() % shares * mine
        own = gate[..., first : first + mine, :].flatten(-2)
        return (attended * torch.sigmoid(own.float())).type_as(attended)


@cache
def with_output_gate(attention: type) -> type:
    """Returns a subclass of Megatron's self-attention that gates its output rightly."""
    return type(f"{attention.__name__}WithOutputGate", (OutputGate, attention), {})
