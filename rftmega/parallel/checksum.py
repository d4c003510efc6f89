"""Whether what one process wrote is what another reads."""

import torch
from torch import Tensor

BLOCK = 64  # bytes
LANES = torch.tensor([1, 3, 5, 7, 11, 13, 17, 19])  # odd, and different: words that change places change the sum


def blocks(size: int) -> int:
    """`size` bytes, rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def checksum(data: Tensor) -> Tensor:
    """[] int64, of [bytes] in whole blocks: a weighted sum of 8-byte words, computed where the data is, in one pass."""
    return (data.view(torch.int64).view(-1, len(LANES)).sum(0) * LANES.to(data.device)).sum()
