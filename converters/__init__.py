"""One two-way table of rules a model family: Hugging Face names and shapes on one side, Megatron's
on the other.

Knows names and shapes, not Megatron: the same table serves loading at start, HF export, live weight
sync and offline conversion, so they cannot drift. A new family is one file in `families/` (and one
in `model_providers/families/`).
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

FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(families.__path__)))
# old Llama folders have them; they follow from config.json
NOT_WEIGHTS = r".*\.rotary_emb\.inv_freq"


# of config.json: layers that predict a second token and further ones, which nobody trains
OF_PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def has_table(hf_config: Mapping[str, Any]) -> bool:
    """Returns whether the family that config.json names has a table here."""
    return hf_config.get("model_type") in FAMILIES


def table(hf_config: Mapping[str, Any], *, value_head: bool = False) -> list[Rule]:
    """Returns the rules of the family that config.json names.

    With `value_head`, of its value model instead.

    Raises CheckpointError for a family without a table.
    """
    hf_config = completed(hf_config)
    rules: list[Rule] = _family(hf_config).table(hf_config)
    if not value_head:
        return rules
    body = [rule for rule in rules if rule.megatron != ("output_layer.weight",)]
    return [*body, *decoder.value_head(hf_config)]


def completed(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with the family's defaults of what is absent.

    Raises CheckpointError for a family without a table, and for fields that are missing, null or of
    another kind.
    """
    fields: Fields | VisionFields | AudioFields = _family(hf_config).FIELDS
    return fields.completed(hf_config)


def default_rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Returns the base of the rotary embedding where config.json names none."""
    fields: Fields | VisionFields | AudioFields = _family(hf_config).FIELDS
    return fields.rope_theta


def left_out(hf_config: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns those of `names`, all of a folder's, that a folder of this family may hold and that
    no rule speaks of.
    """
    names = set(names)
    found = {name for name in names if re.fullmatch(NOT_WEIGHTS, name)}
    if of_family := getattr(_family(hf_config), "left_out", None):
        found |= of_family(completed(hf_config), names)
    return found


def written(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json that are another in a folder that we write, None for one
    that it does not have: it holds nothing of what is left out, and no quantised weights.

    Of a family without a table, a backend that needs none writes what transformers reads: no layers
    that predict further tokens.
    """
    if has_table(hf_config):
        of_family = getattr(_family(hf_config), "written", None)
        changes: dict[str, Any] = of_family(completed(hf_config)) if of_family else {}
    else:
        changes = {name: 0 for name in OF_PREDICTORS if hf_config.get(name)}
    return changes | ({FIELD: None} if hf_config.get(FIELD) is not None else {})


def stacks_of(hf_config: Mapping[str, Any]) -> list[Stack]:
    """Returns the tensors of a folder that hold a matrix of every expert, which the rules know one
    by one; none of a family without a table, whose tensors a backend knows as the folder has them.
    """
    if not has_table(hf_config):
        return []
    of_family = getattr(_family(hf_config), "stacks", None)
    return of_family(completed(hf_config)) if of_family else []


def _family(hf_config: Mapping[str, Any]) -> Any:
    family = hf_config.get("model_type")
    if not has_table(hf_config):
        raise CheckpointError(
            f"There is no conversion table for model_type={family!r}; there is one for {', '.join(FAMILIES)}."
        )
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
