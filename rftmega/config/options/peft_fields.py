"""Checks adapter_config.json for PEFT features other than plain LoRA, which adds to each weight a
product of two matrices, scaled by `lora_alpha` and `r`.

The fields are those of LoraConfig in peft 0.21.2.
"""

from collections.abc import Mapping
from typing import Any

# supported, or without effect on a saved adapter: bookkeeping, how it was trained
READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules"),
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "runtime_config", "megatron_core"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),  # of init_lora_weights
        "qalora_group_size",  # of use_qalora
    }
)
# fields that change the computation, with the values that switch them off, besides null
PLAIN: dict[str, tuple[Any, ...]] = {
    **{"use_dora": (False,), "fan_in_fan_out": (False,), "lora_bias": (False,)},
    **{"bias": ("none",), "modules_to_save": ([],), "layers_to_transform": ([],)},
    **{"rank_pattern": ({},), "alpha_pattern": ({},)},
    **{"layers_pattern": ([], ""), "exclude_modules": ([], ""), "target_parameters": ([],)},
    **{"trainable_token_indices": ([], {}), "layer_replication": ([],), "megatron_config": ({},)},
    **{"alora_invocation_tokens": (), "use_qalora": (False,), "ensure_weight_tying": (False,)},
    **{"arrow_config": (), "kasa_config": (), "velora_config": ()},
    **{"monteclora_config": (), "use_bdlora": (False,)},
}
INITS = "init_lora_weights"
# These leave the frozen weights unchanged. The others (pissa, olora, corda, loftq, lora_ga) subtract
# their first product from them, so the saved pairs belong to weights that no folder has.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
EMPTY: tuple[Any, ...] = (
    None,
    False,
    [],
    {},
    "",
)  # values that make an unknown field irrelevant


def foreign_fields(said: Mapping[str, Any]) -> list[str]:
    """Returns one message per unsupported field of an adapter_config.json, with the field's value
    and the reason. `said`: the content of the file.
    """
    found = []
    for name, value in said.items():
        if name == INITS:
            found += _of_init(value)
        elif name in PLAIN:
            if value is not None and value not in PLAIN[name]:
                found.append(f"{name}={value} is not known here: it changes what is computed")
        elif name not in READ and value not in EMPTY:
            found.append(f"{name}={value} is no field that is known here")
    return found


def _of_init(value: Any) -> list[str]:
    if value in PLAIN_INITS and not (isinstance(value, int) and not isinstance(value, bool)):
        return []
    return [
        f"{INITS}={value} changed the frozen weights when the adapter was made, and the matrices belong to those. Save it with "
        "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it an adapter of the "
        "original weights, or merge it with PEFT"
    ]
