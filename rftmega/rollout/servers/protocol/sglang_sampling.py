"""Translates sampling parameters from vLLM to SGLang."""

from collections.abc import Mapping
from typing import Any

ALL = -1  # value of top_k that keeps all tokens


def sampling_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the arguments of vLLM's SamplingParams to SGLang's sampling parameters."""
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
    """Returns whether `sampling`, arguments of vLLM's SamplingParams, restricts tokens by top-p,
    top-k or min-p. If so, SGLang must return its sampling mask: without the mask, its log-probs are
    of the full distribution at its temperature.
    """
    part = sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0
    return bool(sampling["temperature"] > 0 and part)
