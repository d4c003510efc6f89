"""Weights of 8 bits for engines that compute with them (`rollout.quantization`): what a push brings is
quantised where it arrives. Trainer and push know nothing of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rftmega.core.shards import SCALES, is_linear
from rftmega.models.kernels.block_scaled import dequantised, quantise
from rftmega.weights.lazy_tensors import elements_of

BLOCK = 128  # rows and columns that share a scale


def described(kept: Sequence[str]) -> dict[str, Any]:
    """Returns the quantization_config of a folder of such weights; `kept`: the modules that have others."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(kept),
    }


def quantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields numbers and then scales of each linear layer's weight, and all else as it is. All of a
    weight has to be here: a block's largest element may be anywhere.
    """
    for name, tensor in tensors:
        if not is_linear(name):
            yield name, tensor
            continue
        numbers, scales = quantise(elements_of(tensor), BLOCK, BLOCK)
        yield name, numbers
        yield name + SCALES, scales


def rounded(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields what `quantised` tells of each weight, in float32 again."""
    given = quantised(tensors)
    for name, tensor in given:
        if is_linear(name):
            _, scales = next(given)
            yield name, dequantised(tensor, scales, BLOCK, BLOCK)
        else:
            yield name, tensor
