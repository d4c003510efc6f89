"""Finds the fields of a config.json that set dropout or noise in training.

Such fields describe the training run that produced the folder, and are ignored: here only
`model.dropout` sets the dropout of an update, and scoring and generation use none.
"""

import re
from collections.abc import Mapping
from typing import Any

# attention_dropout, attn_pdrop, layerdrop, drop_path_rate, router_jitter_noise, moe_jitter_eps, ...
NAMES = re.compile("drop|jitter")
# by model_type: PhiMoE uses it to choose experts in every forward pass, not only in training
COMPUTED = {"phimoe": ("router_jitter_noise",)}


def drops(name: str, *, family: str = "") -> bool:
    """Returns whether a field `name` sets dropout or noise in training, for models of type `family`
    (model_type).
    """
    return NAMES.search(name) is not None and name not in COMPUTED.get(family, ())


def dropped_by(hf_config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the fields of a config.json, nested sections included, with nonzero dropout or noise,
    e.g. {"attention_dropout": 0.1, "vision_config.drop_path_rate": 0.2}.
    """
    found: dict[str, float] = {}
    family = str(hf_config.get("model_type", ""))
    for name, value in hf_config.items():
        if isinstance(value, Mapping):
            inner = dropped_by({"model_type": family, **value})
            found |= {f"{name}.{field}": share for field, share in inner.items()}
        elif _is_share(value) and drops(name, family=family):
            found[name] = float(value)
    return found


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
