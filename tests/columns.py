"""Padded columns as Ragged ones, for tests that write tensors down."""

import torch
from torch import Tensor

from rftmega.core.ragged import Ragged


def ragged(padded: Tensor) -> Ragged:
    """Rows as long as the tensor is wide."""
    return Ragged.of_padded(padded, torch.full((len(padded),), padded.shape[1]))
