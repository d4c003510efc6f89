"""Reads config.json so that no field is silently ignored."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rftmega.converters import completed, flattened
from rftmega.converters.dropout_fields import drops
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.models.known_fields import without_effect, without_strange_sections

# Fields without effect on the model: bookkeeping, generation, heads of other tasks, unused losses.
NEUTRAL = frozenset(
    {
        *(
            "_name_or_path",
            "architectures",
            "auto_map",
            "dtype",
            "model_type",
            "torch_dtype",
            "transformers_version",
        ),
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "unk_token_id",
            "tokenizer_class",
            "use_cache",
        ),
        *(
            "chunk_size_feed_forward",
            "is_decoder",
            "is_encoder_decoder",
            "pretraining_tp",
            "return_dict",
        ),
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
        *(
            "_attn_implementation",
            "_attn_implementation_autoset",
            "attn_implementation",
            "torchscript",
            "use_bfloat16",
        ),
        *("is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
        *(
            "output_attentions",
            "output_hidden_states",
            "output_router_logits",
            "router_aux_loss_coef",
        ),
    }
)


class HFConfig(Mapping[str, Any]):
    """HFConfig is a mapping of config.json's fields, completed with the architecture's defaults; it
    records which fields were read. A field whose value is null counts as absent.
    """

    def __init__(self, fields: Mapping[str, Any]):
        """`fields`: the content of config.json. Raises CheckpointError for fields that are missing,
        null where not allowed, or of the wrong type.
        """
        fields = flattened(fields)
        self._fields = {
            name: value for name, value in completed(fields).items() if value is not None
        }
        self._given = {name for name, value in fields.items() if value is not None}
        self._named = frozenset(fields)
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        if name not in self._fields:
            raise CheckpointError(
                f"config.json of this {self._fields.get('model_type')} model has no {name!r}."
            )
        return self._fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._fields.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def said(self, name: str) -> bool:
        """Returns whether config.json contains the field `name`, even with the value null."""
        return name in self._named

    def only(self, name: str, *values: Any, why: str) -> None:
        """Raises CheckpointError unless the field `name` is absent or has one of `values`. `why`:
        the reason that the error message gives.
        """
        if (value := self.get(name, values[0])) not in values:
            fits = " and ".join(json.dumps(fit) for fit in values)
            raise CheckpointError(
                f"{name}={json.dumps(value)} is not supported, only {fits}: {why}."
            )

    def refuse_unread(self) -> None:
        """Raises CheckpointError if config.json has a field that no code has read so far and that
        might change the model.
        """
        family = self._fields.get("model_type", "")
        unread = sorted(
            name for name in self._given - self._read - NEUTRAL if not drops(name, family=family)
        )
        if unread:
            nothing = without_effect(self._fields, unread)
            unread = [name for name in unread if name not in nothing]
        if unread:
            said = ", ".join(f"{name}={json.dumps(self._fields[name])}" for name in unread)
            raise CheckpointError(
                f"config.json of this {self._fields.get('model_type')} model says {said}, which is not honoured here: "
                "another model would be trained. Where that changes nothing, set "
                f"model.ignore_config_fields=[{','.join(unread)}]."
            )


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Returns the content of config.json in a Hugging Face folder. In the sections for vision and
    audio encoders, it omits fields that have no effect.

    Raises CheckpointError if the file is missing or not a strict JSON object.
    """
    path = Path(folder) / "config.json"
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{folder} holds no config.json, so it is not a Hugging Face model folder."
        )
    return without_strange_sections(read_json_object(path))
