"""A linear layer with a LoRA adapter, and the delta by which the adapter changes the weight."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rftmega.config import LoRA
from rftmega.core.shards import Box
from rftmega.models.lora.dropped import dropped


class LinearWithPair(nn.Linear):
    """LinearWithPair is a linear layer with a LoRA adapter: it returns W x + bias + scaling * B A
    x.
    """

    def __init__(self, plain: nn.Linear, options: LoRA):
        """Uses the parameters of the layer `plain`; the LoRA matrices are created on the meta
        device, with PEFT's names.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = plain.weight
        self.register_parameter("bias", plain.bias)
        with torch.device("meta"):
            self.lora_A = nn.Linear(self.in_features, options.rank, bias=False)
            self.lora_B = nn.Linear(options.rank, self.out_features, bias=False)
        self.scaling, self.dropout, self.off = options.scaling, options.dropout, False
        self.columns: slice | None = None  # columns of x that this process has; None: all

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Returns the LoRA matrices A [rank, in] and B [out, rank]."""
        return self.lora_A.weight, self.lora_B.weight

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the two factors of the adapter's output, scaling * A x [..., rank] and B; None if
        the adapter is disabled.
        For an LM head, where `linear_stats` never materialises the product.
        """
        if self.off:
            return None
        return self.scaling * self.lora_A(self._dropped(x)), self.lora_B.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.with_product(x, super().forward(x))

    def with_product(self, x: Tensor, completion: Tensor) -> Tensor:
        """Returns the layer's output `completion` [..., out] plus the adapter's, for x [..., in] or
        for this process's columns of x.
        """
        if self.off:
            return completion
        return completion + self.scaling * self.lora_B(self.lora_A(self._dropped(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return x
        return dropped(x, self.dropout, width=self.in_features, columns=self.columns)


@dataclass(frozen=True, slots=True)
class PairDelta:
    """PairDelta is the delta that an adapter adds to this process's rows of a weight, in a form
    (`shards.Addend`) that is added when a shard of the weight is read.
    """

    down: Tensor  # A, or this process's columns of it
    up: Tensor  # the weight's rows of B
    scaling: float

    @torch.no_grad()
    def of(self, box: Box) -> Tensor:
        rows, columns = (slice(*ends) for ends in box)
        return self.scaling * (self.up[rows].float() @ self.down[:, columns].float())
