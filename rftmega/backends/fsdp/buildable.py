"""Finds out, without memory for a model, whether FSDPModelManager can build it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from rftmega.backends.decoder.meta_decoder import gathered_apart
from rftmega.backends.decoder.parameter_places import Placed
from rftmega.backends.fsdp.adapters import ShardedAdapters
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.module import (
    OTHER_HEAD,
    VALUE_BIAS,
    meta_model,
    opened,
    places_in,
    unusable,
    with_head,
)
from rftmega.backends.fsdp.sharding import refuse_to_materialise
from rftmega.config import LoRA
from rftmega.core.json_files import read_json_object
from rftmega.model_providers.output_head import names_of_head
from rftmega.models.hf.hf_folder import HFFolder

ROWS = 4096  # of the LM head that are compared at a time


def refuse_unbuildable(
    path: str | Path, *, value_model: bool = False, lora: LoRA | None = None
) -> None:
    """Raises the CheckpointError with which FSDPModelManager would refuse the model folder `path`,
    as far as config.json, the headers of the weights and a tied LM head say; a ConfigError if the
    model can't have the adapters `lora`.

    `value_model`: a value head replaces the LM head. NaN in the weights is found only when they are
    read.
    """
    path = str(path)
    files = opened(path, read_json_object(Path(path) / "config.json"))
    model, unpacked = meta_model(path)
    bias = VALUE_BIAS in files
    built = with_head(model, unpacked, path, value_model=value_model, head_bias=bias)
    places = places_in(files, built, value_model=value_model)
    if not value_model:
        _refuse_other_head(files, model, places)
    if lora is not None and lora.rank:
        nowhere = cast(ShardingMesh, None)  # no process's rows are asked for
        ShardedAdapters(built.network, model, lora, nowhere).places(places)
    gathered_apart(model, built.network.head)
    refuse_to_materialise(built.network, model)


def _refuse_other_head(
    files: HFFolder, model: PreTrainedModel, places: Mapping[str, Sequence[Placed]]
) -> None:
    """Raises CheckpointError if the embedding is tied and the folder has another LM head."""
    head = names_of_head(model)[0]
    if not getattr(model.config, "tie_word_embeddings", False) or head not in files:
        return
    embedding = model.get_input_embeddings().weight
    name = next(name for name, each in model.named_parameters() if each is embedding)
    (place,) = places[name]
    one, other = (files.slice_of(each, place.shape) for each in (place.name, head))
    for start in range(0, place.shape[0], ROWS):
        if not torch.equal(one[start : start + ROWS].float(), other[start : start + ROWS].float()):
            raise unusable(files, [OTHER_HEAD.format(head=head)])
