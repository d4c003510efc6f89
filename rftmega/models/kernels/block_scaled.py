"""Block-scaled 8-bit quantisation of matrices: FP8 (e4m3), like DeepSeek-V3's published weights
(arXiv:2412.19437, section 3.3.2), or int8.

Legend: R rows, C columns of a weight.
"""

import torch
from torch import Tensor

NUMBERS = torch.float8_e4m3fn
LARGEST = torch.finfo(NUMBERS).max


def quantise(
    weight_RC: Tensor, high: int, wide: int, numbers: torch.dtype = NUMBERS
) -> tuple[Tensor, Tensor]:
    """Returns quantised numbers [R, C] of dtype `numbers` (e4m3 or int8) and scales [blocks down,
    blocks across] in float32.
    A block has `high` rows and `wide` columns; its largest magnitude is mapped to the largest
    number of the dtype. A block of zeros has scale 1.
    """
    largest = LARGEST if numbers is NUMBERS else torch.iinfo(numbers).max
    rows, columns = weight_RC.shape
    down, across = -(-rows // high), -(-columns // wide)
    padded = weight_RC.new_zeros(down * high, across * wide, dtype=torch.float32)
    padded[:rows, :columns] = weight_RC
    blocks = padded.view(down, high, across, wide)
    scales = blocks.abs().amax((1, 3)) / largest
    scales = torch.where(scales == 0, 1.0, scales)
    found = blocks / scales[:, None, :, None]
    if not numbers.is_floating_point:
        found = found.round()  # a conversion to whole numbers cuts
    return found.to(numbers).view(padded.shape)[:rows, :columns].contiguous(), scales


def dequantised(numbers_RC: Tensor, scales: Tensor, high: int, wide: int) -> Tensor:
    """Returns the weight [R, C] in float32: each number times the scale of its block of `high` rows
    and `wide` columns; `scales` [blocks down, blocks across].
    """
    rows, columns = numbers_RC.shape
    spread = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return numbers_RC.float() * spread
