"""Quantises pushed weights to fp8 when they arrive, for engines that compute in fp8
(`rollout.quantization`). The trainer sends unquantised weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rftmega.core.shards import SCALES, is_linear
from rftmega.models.kernels.block_scaled import dequantised, quantise
from rftmega.weights.lazy_tensors import elements_of

BLOCK = 128  # rows and columns that share a scale


def described(kept: Sequence[str]) -> dict[str, Any]:
    """Returns the quantization_config of an fp8 model. `kept`: names of the modules that stay
    unquantised.
    """
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(kept),
    }


def quantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the fp8 numbers and then the scales of each linear layer's weight, and all other
    tensors unchanged. A weight must be complete, since a block's scale depends on the largest
    element of the block.
    """
    for name, tensor in tensors:
        if not is_linear(name):
            yield name, tensor
            continue
        numbers, scales = quantise(elements_of(tensor), BLOCK, BLOCK)
        yield name, numbers
        yield name + SCALES, scales


def rounded(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors, with the weights of linear layers rounded to fp8 and converted back to
    fp32.
    """
    given = quantised(tensors)
    for name, tensor in given:
        if is_linear(name):
            _, scales = next(given)
            yield name, dequantised(tensor, scales, BLOCK, BLOCK)
        else:
            yield name, tensor
