"""Knows which backends train the model of a config.json, for errors that name another backend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftmega.config.capabilities import BACKENDS
from rftmega.core.errors import CheckpointError
from rftmega.model_providers import transformers_decoders
from rftmega.model_providers.description import described
from rftmega.model_providers.hf_config import read_hf_config


def refusal_of(backend: str, fields: Mapping[str, Any]) -> str:
    """Returns the reason why a backend can't train the model of config.json, whose content is
    `fields`; "" if it can.
    """
    if BACKENDS[backend].any_decoder:
        return transformers_decoders.refusal(fields)
    try:
        described(fields)
    except CheckpointError as error:
        return str(error)
    return ""


def fields_of(config: Any) -> Mapping[str, Any]:
    """Returns the content of the config.json that transformers' `config` was read from; all its
    fields if it was read from no folder.
    """
    folder = Path(config.name_or_path or "none")
    found: Mapping[str, Any] = (
        read_hf_config(folder) if (folder / "config.json").is_file() else config.to_dict()
    )
    return found


def advice(config: Any, remedy: str) -> str:
    """Returns a sentence of advice for an error of backend=fsdp: `remedy`, and backend=megatron if
    it trains the model.

    `config`: transformers' config of the model, or the content of its config.json.
    """
    fields = config if isinstance(config, Mapping) else fields_of(config)
    if refusal_of("megatron", fields):
        return f"{remedy}."
    return f"{remedy}, or take backend=megatron."
