"""Describes weights of 4 bits in the format MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss's folders
have them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rftmega.converters.block_scales import DTYPES, FIELD
from rftmega.core.errors import CheckpointError

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors that a weight is stored as
GROUP = 32  # numbers that share a scale, two of them in a byte


class MXFP4(NamedTuple):
    """MXFP4 holds the dtype in which packed weights are read. Packed are the experts' matrices [E,
    C, R] of a layer: `<name>_blocks` [E, R, C / 32, 16] and `<name>_scales` [E, R, C / 32].
    """

    dtype: str


def mxfp4(hf_config: Mapping[str, Any]) -> MXFP4 | None:
    """Returns the dtype of the packed weights that config.json describes, None if it describes
    none. Raises CheckpointError for a dtype that isn't one of weights.
    """
    said = hf_config.get(FIELD)
    if not isinstance(said, Mapping) or said.get("quant_method") != METHOD:
        return None
    dtype = hf_config.get("dtype") or hf_config.get("torch_dtype") or DTYPES[0]
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r} of quantised weights: it must be one of {DTYPES}.")
    return MXFP4(dtype)
