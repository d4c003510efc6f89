"""Groups: which parameters of a decoder FSDP2 gathers together."""

from typing import NamedTuple

import torch
from torch import nn

from rftmega.hf_folders.decoder import TransformersModel, read_config, tower_of
from rftmega.hf_folders.meta_decoder import describe, gathered_apart, on_meta

Shape = tuple[int, ...]


class Groups(NamedTuple):
    """Groups holds the shapes of parameters, as FSDP2 gathers them."""

    apart: tuple[tuple[Shape, ...], ...]  # one after another, in the order of the forward pass
    whole_pass: tuple[Shape, ...]  # from the beginning of a pass to its end


def read_groups(path: str, *, value: bool) -> tuple[TransformersModel, Groups]:
    """Describes the decoder of a folder's config.json, with a number a token as its head if
    `value`.

    Raises CheckpointError where transformers can't build it.
    """
    config = read_config(path)
    model = on_meta(config, "eager")
    said, head = describe(model, tower_of(path, config)), model.get_output_embeddings()
    if value:
        with torch.device("meta"):
            head = nn.Linear(said.hidden, 1, bias=False)
    apart = gathered_apart(model, head)
    taken = {id(parameter) for module in apart for parameter in module.parameters()}
    rest = [each for each in model.base_model.parameters() if id(each) not in taken]
    shapes = [tuple(tuple(each.shape) for each in module.parameters()) for module in apart]
    return said, Groups(tuple(shapes), tuple(tuple(each.shape) for each in rest))
