"""Converts weights between Hugging Face and Megatron: one table of two-way rules per architecture.
The tables contain names and shapes and are independent of Megatron: the same table is used for
loading, HF export, live weight sync and offline conversion, so these cannot diverge. A new
architecture is an entry in `llama_like.py`, or one file in `families/` and one in
`model_providers/families/`.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rftmega.converters import decoder, families
from rftmega.converters.audio_fields import AudioFields
from rftmega.converters.block_scales import FIELD
from rftmega.converters.config_fields import Fields
from rftmega.converters.llama_like import LLAMA_LIKE, LlamaLike
from rftmega.converters.nested_fields import VisionFields, flattened
from rftmega.converters.rules import (
    QKV,
    Column,
    HFTensor,
    Replicated,
    Row,
    Rule,
    Segment,
    Vocabulary,
    assemble,
    instances,
    located,
    padded_vocabulary,
    shard,
    shard_shape,
)
from rftmega.converters.stacks import Stack
from rftmega.core.errors import CheckpointError

FAMILIES = tuple(
    sorted({*(module.name for module in pkgutil.iter_modules(families.__path__)), *LLAMA_LIKE})
)
# present in old Llama folders; derived from config.json
NOT_WEIGHTS = r".*\.rotary_emb\.inv_freq"


# fields of config.json: multi-token prediction (MTP) layers, which are not trained
OF_PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def has_table(hf_config: Mapping[str, Any]) -> bool:
    """Returns whether a conversion table exists for the architecture (model_type) of config.json."""
    return hf_config.get("model_type") in FAMILIES


def table(hf_config: Mapping[str, Any], *, value_head: bool = False) -> list[Rule]:
    """Returns the conversion rules (see `rules.Rule`) of all tensors of the model that config.json
    describes.

    `hf_config`: the parsed config.json; `value_head`: the model is a value model, which has a value
    head instead of the LM head. Raises CheckpointError for an architecture without a table.
    """
    hf_config = completed(hf_config)
    rules: list[Rule] = _family(hf_config).table(hf_config)
    if not value_head:
        return rules
    body = [rule for rule in rules if rule.megatron != ("output_layer.weight",)]
    return [*body, *decoder.value_head(hf_config)]


def completed(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json, with the architecture's default for each absent field.

    Raises CheckpointError for an architecture without a table, and for fields that are missing,
    null or of the wrong type.
    """
    return _fields(hf_config).completed(hf_config)


def default_rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Returns the base of the rotary embedding (rope_theta) that the architecture uses if
    config.json does not set one.
    """
    return _fields(hf_config).rope_theta


def left_out(hf_config: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns the names of tensors in a Hugging Face folder that are ignored because no rule covers
    them, such as those of multi-token prediction layers.

    `names`: all tensor names of the folder. Names that are neither covered by a rule nor known for
    the architecture are not returned.
    """
    names = set(names)
    found = {name for name in names if re.fullmatch(NOT_WEIGHTS, name)}
    if of_family := getattr(_family(hf_config), "left_out", None):
        found |= of_family(completed(hf_config), names)
    return found


def written(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes to config.json for an exported folder: field -> new value, or None to
    remove the field. A field of its section `text_config` is changed there.

    An export contains no tensors that the architecture's conversion table lists in `left_out`, and
    no quantised weights. An architecture without a conversion table is exported with the tensors
    that transformers reads, which exclude multi-token prediction layers.
    """
    text = hf_config.get("text_config") or {}
    if has_table(hf_config):
        of_family = getattr(_family(hf_config), "written", None)
        changes: dict[str, Any] = of_family(completed(hf_config)) if of_family else {}
    else:
        changes = {name: 0 for name in OF_PREDICTORS if hf_config.get(name) or text.get(name)}
    if inner := {name: value for name, value in changes.items() if name in text}:
        outer = {
            name: value for name, value in changes.items() if name not in text or name in hf_config
        }
        changes = outer | {"text_config": {**text, **inner}}
    return changes | ({FIELD: None} if hf_config.get(FIELD) is not None else {})


def stacks_of(hf_config: Mapping[str, Any]) -> list[Stack]:
    """Returns descriptions of the folder's stacked tensors, each of which concatenates a matrix
    (e.g. down_proj) of all experts of a layer; the rules list these matrices individually.

    Returns [] for an architecture that has none, or has no table: its backend then reads the
    folder's tensors unchanged.
    """
    if not has_table(hf_config):
        return []
    of_family = getattr(_family(hf_config), "stacks", None)
    return of_family(completed(hf_config)) if of_family else []


def _fields(hf_config: Mapping[str, Any]) -> Fields | VisionFields | AudioFields:
    family = _family(hf_config)
    found: Fields | VisionFields | AudioFields = (
        family.fields if isinstance(family, LlamaLike) else family.FIELDS
    )
    return found


def _family(hf_config: Mapping[str, Any]) -> Any:
    """Returns the entry of LLAMA_LIKE, or the module in `families/`, of a config.json."""
    family = hf_config.get("model_type")
    if not has_table(hf_config):
        raise CheckpointError(
            f"There is no conversion table for model_type={family!r}; there is one for {', '.join(FAMILIES)}."
        )
    if family in LLAMA_LIKE:
        return LLAMA_LIKE[family]
    return importlib.import_module(f"{families.__name__}.{family}")


__all__ = [
    "Column",
    "HFTensor",
    "QKV",
    "Replicated",
    "Row",
    "Rule",
    "Segment",
    "Vocabulary",
    "assemble",
    "completed",
    "default_rope_theta",
    "flattened",
    "has_table",
    "instances",
    "left_out",
    "located",
    "padded_vocabulary",
    "shard",
    "shard_shape",
    "stacks_of",
    "table",
    "written",
]
