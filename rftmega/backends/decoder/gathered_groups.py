"""Describes FSDP2's parameter groups: the parameters of a decoder and its adapters that are
gathered together.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from rftmega.backends.decoder.adapted_layers import AdaptedLayers, adapted_of
from rftmega.backends.decoder.describe import TransformersModel, read_config, tower_of
from rftmega.backends.decoder.meta_decoder import describe, gathered_apart
from rftmega.backends.decoder.tensor_plan import splits_of, styles_of
from rftmega.model_providers.output_head import decoder_of
from rftmega.model_providers.transformers_decoders import on_meta

Shape = tuple[int, ...]


class Groups(NamedTuple):
    """Groups holds the shapes of the parameters in each FSDP2 group, that is, of the parameters
    that are gathered together; under tensor parallelism, the shapes of one process's shares.
    """

    apart: tuple[tuple[Shape, ...], ...]  # gathered one after another, in forward order
    whole_pass: tuple[Shape, ...]  # gathered from the beginning of a pass to its end
    # A and B of each adapter in each group of `apart`; only these are trained. (): the whole model
    # is
    pairs: tuple[tuple[Shape, ...], ...] = ()
    beside: tuple[
        Shape, ...
    ] = ()  # of a value head, the last of `apart`: trained in full, in addition to `pairs`
    looked_up: tuple[Shape, ...] = ()  # B of the embedding's pair, if any: merging needs it like A


@lru_cache(8)
def _built(path: str) -> tuple[Any, TransformersModel]:
    config = read_config(path)
    model = on_meta(config, "eager")
    return model, describe(model, tower_of(path, config))


@lru_cache(64)
def read_groups(
    path: str, *, value: bool, tensor: int, rank: int = 0, targets: tuple[str, ...] = ()
) -> tuple[TransformersModel, Groups]:
    """Returns the description of a folder's decoder, and the FSDP2 groups of the first of `tensor`
    tensor-parallel processes.

    `value`: a value head replaces the LM head. `rank`: LoRA rank; above 0 the layers in `targets`
    (last parts of module names; empty: all linear layers and experts) have adapters. Raises
    CheckpointError if transformers can't build the model or if it can't be split over the
    processes, and ConfigError if it can't have these adapters.
    """
    model, said = _built(path)
    head = model.get_output_embeddings()
    if value:
        with torch.device("meta"):
            head = nn.Linear(said.hidden, 1, bias=False)
    shares: dict[int, Shape] = {}
    if tensor > 1:
        splits = splits_of(model, styles_of(model, tensor), 0, tensor)
        for name, split in splits.items():
            whole = model.get_parameter(name)
            shares[id(whole)] = split.of(tuple(whole.shape))

    def shape_of(parameter: torch.Tensor) -> Shape:
        return shares.get(id(parameter), tuple(parameter.shape))

    apart = gathered_apart(model, head)
    taken = {id(parameter) for module in apart for parameter in module.parameters()}
    rest = [each for each in decoder_of(model).parameters() if id(each) not in taken]
    shapes = [tuple(shape_of(each) for each in module.parameters()) for module in apart]
    pairs: list[tuple[Shape, ...]] = []
    looked_up: list[Shape] = []
    if rank:
        layers = adapted_of(model, targets, value=value)
        parts = _parts(model, layers)
        embeddings = {id(each.weight) for each in layers.embeddings.values()}
        for module in apart:
            of_group: list[Shape] = []
            for parameter in module.parameters():
                shape = shape_of(parameter)
                if id(parameter) in embeddings:  # its pair is of the transposed weight
                    of_group += _pairs(shape[::-1], rank, 1, 1)
                    looked_up.append(of_group[-1])
                else:
                    of_group += _pairs(shape, rank, *parts.get(id(parameter), (0, 0)))
            pairs.append(tuple(of_group))
    beside = shapes[-1] if rank and value else ()
    always = tuple(shape_of(each) for each in rest)
    return said, Groups(tuple(shapes), always, tuple(pairs), beside, tuple(looked_up))


def _parts(model: Any, layers: AdaptedLayers) -> dict[int, tuple[int, int]]:
    """Returns parameter id -> (number of matrices stacked in the parameter, number of them with a
    LoRA pair), for the parameters of `model` that get adapters (`layers`).
    """
    found = {id(linear.weight): (1, 1) for linear in layers.linears.values()}
    for name, parts in layers.stacks.items():
        chosen = len(layers.targets.intersection(parts))
        found[id(model.get_parameter(name))] = len(parts), chosen
    return found


def _pairs(shape: Shape, rank: int, parts: int, chosen: int) -> list[Shape]:
    """Returns the shapes of A and B of each LoRA pair of rank `rank` on a weight or a fused expert
    tensor of shape `shape`.

    `parts`: number of matrices stacked in it; `chosen`: number of them with a pair.
    """
    if not chosen:
        return []
    *experts, rows, columns = shape
    return [(*experts, rank, columns), (*experts, rows // parts, rank)] * chosen
