"""Describes quantised weights that can be loaded: FP8 with one scale per block, the format of
DeepSeek-V3, Kimi-K2 and Qwen3's FP8 folders.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rftmega.converters.config_fields import is_whole
from rftmega.core.errors import CheckpointError

FIELD = "quantization_config"
METHOD, NUMBERS = "fp8", "e4m3"
# fields about activations, which are not quantised here, and weights, identified by their dtype
UNREAD = ("activation_scheme", "scale_fmt", "modules_to_not_convert", "ignored_layers")
DTYPES = ("bfloat16", "float16", "float32")


class BlockScales(NamedTuple):
    """BlockScales holds the number of rows and columns of a block, whose elements share a scale,
    and the model's dtype.
    """

    rows: int
    columns: int
    dtype: str


def block_scales(hf_config: Mapping[str, Any]) -> BlockScales | None:
    """Returns the block size and dtype of the quantised weights that config.json describes; None if
    the weights are not quantised.
    Raises CheckpointError, naming the field, for an unsupported quantisation.
    """
    said = hf_config.get(FIELD)
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("quant_method") != METHOD:
        method = said.get("quant_method") if isinstance(said, dict) else said
        raise CheckpointError(
            f"{FIELD} quant_method={method!r} is not read; {METHOD!r} with weight_block_size and 'mxfp4' are. Take a folder in "
            "bfloat16: quantised weights can't be trained."
        )
    block = said.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(is_whole(n, 1) for n in block):
        raise CheckpointError(
            f"{FIELD} weight_block_size={block!r}: it must list two positive whole numbers."
        )
    if (numbers := said.get("fmt", NUMBERS)) != NUMBERS:
        raise CheckpointError(f"{FIELD} fmt={numbers!r} is not read; {NUMBERS!r} is.")
    known = ("quant_method", "weight_block_size", "fmt", *UNREAD)
    if unread := sorted(set(said) - set(known)):
        raise CheckpointError(
            f"{FIELD} has {unread[0]}={said[unread[0]]!r}, which is not honoured here."
        )
    dtype = hf_config.get("dtype") or hf_config.get("torch_dtype") or DTYPES[0]
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r} of quantised weights: it must be one of {DTYPES}.")
    return BlockScales(block[0], block[1], dtype)
