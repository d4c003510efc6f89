"""Numbers of 4 bits (e2m1) that share a power of two as scale in groups of 32: MXFP4 (OCP
Microscaling Formats 1.0, sections 5.2 and 5.3.3).

Legend: G groups, R any leading dimensions, C = 32 G columns of a weight.
"""

import torch
from torch import Tensor

from rftmega.converters.mxfp4 import GROUP

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 ... 7; code + 8: negative
BIAS = 127  # of a scale's exponent (e8m0)
SIGN = 8
MOST_DOUBLED = 3  # frexp's exponent of 4: the largest codes stand for 4 ... 6


def dequantised(blocks_RGB: Tensor, scales_RG: Tensor) -> Tensor:
    """Returns the numbers [R, C] in float32. `blocks_RGB`: 16 bytes per group, each with two codes,
    the lower four bits first; `scales_RG`: exponents, plus 127. All products are exact.
    """
    values = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    bytes_ = torch.arange(256)
    pairs = torch.stack([values[bytes_ & 15], values[bytes_ >> 4]], -1)  # [256, 2]
    found = pairs[blocks_RGB.long()].flatten(-2)  # [R, G, 32]
    return torch.ldexp(found, scales_RG.int()[..., None] - BIAS).flatten(-2)


def quantise(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns blocks [R, G, 16] and scales [R, G], both uint8, for a weight [R, C]: each number
    becomes the nearest code, to even if two are as near.

    The scale maps a group's largest magnitude to 4 ... 7, of which more than 6 becomes 6, so that
    numbers which were dequantised come back exactly. A group of zeros has scale 1.
    """
    groups = weight_RC.float().unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(most)
    exponent = exponent - MOST_DOUBLED + (mantissa > 7 / 8)
    exponent = torch.where(most == 0, 0, exponent).clamp(-BIAS, BIAS)
    scaled = torch.ldexp(groups, -exponent[..., None])
    middles = torch.tensor([(a + b) / 2 for a, b in zip(MAGNITUDES, MAGNITUDES[1:], strict=False)])
    low = torch.bucketize(scaled.abs(), middles)
    high = torch.bucketize(scaled.abs(), middles, right=True)  # differs in the middle of two
    codes = torch.where(low % 2 == 0, low, high) + SIGN * scaled.signbit()
    codes = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4, (exponent + BIAS).to(torch.uint8)
