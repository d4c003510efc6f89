"""One two-way table of rules a model family: Hugging Face names and shapes on one side, Megatron's on the other.

Knows names and shapes, not Megatron: the same table serves loading at start, HF export, live weight sync and offline
conversion, so they cannot drift. A new family is one file here (and one in `model_providers/`), listed in TABLES.
"""

from collections.abc import Callable
from typing import Any

from converters import decoders
from converters.rules import (
    QKV,
    Column,
    HFTensor,
    Replicated,
    Row,
    Rule,
    Segment,
    Vocabulary,
    assemble,
    padded_vocabulary,
    shard,
    shard_shape,
)
from rftmega.errors import CheckpointError

TABLES: dict[str, Callable[[dict[str, Any]], list[Rule]]] = {
    "llama": decoders.llama,
    "qwen2": decoders.qwen2,
    "qwen3": decoders.qwen3,
    "qwen3_moe": decoders.qwen3_moe,
}


def table(hf_config: dict[str, Any], *, value_head: bool = False) -> list[Rule]:
    """The rules of the family that config.json names; with `value_head`, of its value model instead.

    Raises CheckpointError for a family without a table.
    """
    family = hf_config.get("model_type")
    if family not in TABLES:
        raise CheckpointError(f"There is no conversion table for model_type={family!r}; there is one for {', '.join(TABLES)}.")
    rules = TABLES[family](hf_config)
    if not value_head:
        return rules
    body = [rule for rule in rules if rule.megatron != ("output_layer.weight",)]
    return [*body, *decoders.value_head(hf_config)]


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
    "padded_vocabulary",
    "shard",
    "shard_shape",
    "table",
]
