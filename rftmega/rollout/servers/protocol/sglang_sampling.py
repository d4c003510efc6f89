"""Says in SGLang's words how tokens are to be drawn."""

from collections.abc import Mapping
from typing import Any

ALL = -1  # tokens that top_k keeps


def sampling_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what vLLM's SamplingParams takes in the names of SGLang's."""
    found = {
        "max_new_tokens": sampling["max_tokens"],
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "top_k": sampling["top_k"] or ALL,
        "min_p": sampling["min_p"],
        "sampling_seed": sampling["seed"],
        "stop_token_ids": list(sampling["stop_token_ids"]),
        "ignore_eos": True,  # the stop tokens are ours alone
        "no_stop_trim": True,  # tokens and log-probs belong together
    }
    if sampling.get("stop"):
        found["stop"] = list(sampling["stop"])
    return found


def filters(sampling: Mapping[str, Any]) -> bool:
    """Says whether tokens are drawn from a part of the distribution. SGLang's log-probs are of all of
    it, at its temperature; those of the part come with its mask.
    """
    part = sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0
    return bool(sampling["temperature"] > 0 and part)
