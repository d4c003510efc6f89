"""Translates sampling parameters from vLLM to SGLang."""

from collections.abc import Mapping
from typing import Any

ALL = -1  # value of top_k that keeps all tokens


def sampling_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns SGLang's sampling parameters for those of vLLM's SamplingParams."""
    found = {
        "max_new_tokens": sampling["max_tokens"],
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "top_k": sampling["top_k"] or ALL,
        "min_p": sampling["min_p"],
        "sampling_seed": sampling["seed"],
        "stop_token_ids": list(sampling["stop_token_ids"]),
        "ignore_eos": True,  # only our stop tokens count
        "no_stop_trim": True,  # keeps tokens and log-probs aligned
    }
    if sampling.get("stop"):
        found["stop"] = list(sampling["stop"])
    return found


def filters(sampling: Mapping[str, Any]) -> bool:
    """Returns whether sampling is truncated (top-p, top-k, min-p). SGLang's log-probs are of the
    full distribution at its temperature; those of the truncated one come with its mask.
    """
    part = sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0
    return bool(sampling["temperature"] > 0 and part)
