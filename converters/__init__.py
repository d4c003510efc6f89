"""One two-way table of rules a model family: Hugging Face names and shapes on one side, Megatron's on the other.

Knows names and shapes, not Megatron: the same table serves loading at start, HF export, live weight sync and offline
conversion, so they cannot drift. A new family is one file here (and one in `model_providers/`), listed in TABLES.
"""

from collections.abc import Callable
from typing import Any

from converters import dense
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
    "llama": dense.llama,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
}


def table(hf_config: dict[str, Any]) -> list[Rule]:
    """The rules of the family that config.json names. Raises CheckpointError for a family without a table."""
    family = hf_config.get("model_type")
    if family not in TABLES:
        raise CheckpointError(f"There is no conversion table for model_type={family!r}; there is one for {', '.join(TABLES)}.")
    return TABLES[family](hf_config)


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
