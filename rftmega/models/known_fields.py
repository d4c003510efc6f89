"""Identifies config.json fields without effect: fields that transformers' config class of the
architecture does not know.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

# Fields that shared code of transformers or vLLM looks for in any config, whatever its class knows.
READ_OF_ANY = frozenset(
    {
        *("attention_chunk_size", "is_causal", "layer_types", "num_kv_shared_layers"),
        *("sliding_window", "use_bidirectional_attention", "position_embedding_type"),
        *("compression_config", "quantization_config", "head_dtype", "embedding_size"),
        *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
        *("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "qk_norm"),
    }
)
SECTIONS = ("text_config", "vision_config", "audio_config")
_ignored: set[str] = set()


def ignore(names: Iterable[str]) -> None:
    """Sets the names of config.json fields that this process ignores (model.ignore_config_fields),
    replacing earlier ones.
    """
    _ignored.clear()
    _ignored.update(names)


def without_effect(given: Mapping[str, Any], unread: Sequence[str], section: str = "") -> list[str]:
    """Returns and logs the `unread` fields that have no effect: fields that `ignore` set, and
    fields that transformers' config class of the model does not know.
    If `auto_map` names code in the model's folder, only fields that `ignore` set are returned,
    since that code may read any field. `given`: config.json; `section`: its section that contains
    the fields, such as vision_config.
    """
    named = sorted(name for name in unread if name in _ignored)
    rest = [name for name in unread if name not in _ignored]
    model = str(given.get("model_type"))
    known = None if given.get("auto_map") or not rest else _known(model, section)
    strange = [] if known is None else sorted(set(rest) - known - READ_OF_ANY)
    values = given.get(section, {}) if section else given
    if strange:
        _tell(
            f"config.json of this {model} model has {_shown(values, strange, section)}: transformers' class of the model "
            "does not know such a field, so it has no effect and is ignored."
        )
    if named:
        _tell(f"config.json has {_shown(values, named, section)}: model.ignore_config_fields.")
    return [*strange, *named]


def without_strange_sections(given: dict[str, Any]) -> dict[str, Any]:
    """Returns `given`, the content of config.json, without the fields of its sections (SECTIONS)
    that have no effect; see `without_effect`.
    """
    found = dict(given)
    for section in SECTIONS:
        inner = given.get(section)
        if isinstance(inner, dict):
            left_out = set(without_effect(given, list(inner), section))
            found[section] = {name: inner[name] for name in inner if name not in left_out}
    return found


@cache
def _known(model: str, section: str) -> frozenset[str] | None:
    """Returns the field names that transformers' config class of a model type knows, for a section
    or for the whole config; None if transformers has no such class.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model not in CONFIG_MAPPING:
        return None
    made = CONFIG_MAPPING[model]()
    parts = [made] if not section else []
    for name in [section] if section else ["text_config"]:
        inner = getattr(made, name, None)
        parts += [inner] if inner is not None else []
    if not parts:
        return None
    return frozenset(
        name for part in parts for name in (*part.to_dict(), *type(part).attribute_map)
    )


def _shown(values: Mapping[str, Any], names: Sequence[str], section: str) -> str:
    prefix = f"{section}." if section else ""
    return ", ".join(f"{prefix}{name}={json.dumps(values.get(name))}" for name in names)


@cache
def _tell(text: str) -> None:
    """Logs a message once per process, on the first process of a run."""
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", text)
