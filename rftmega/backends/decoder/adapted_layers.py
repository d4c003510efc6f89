"""Finds the layers of a transformers model that get LoRA adapters (arXiv:2106.09685), with PEFT's
names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from rftmega.backends.decoder.meta_decoder import EXPERT_DIMENSIONS, vocabulary_of
from rftmega.config.options.adapters import OF_ATTENTION, experts_targeted
from rftmega.converters.adapters import (
    pair_names,
    refuse_named,
    refuse_unknown,
    without_head,
)
from rftmega.core.errors import ConfigError
from rftmega.core.shards import EMBEDDING, HEAD, OF_VOCABULARY
from rftmega.model_providers.backend_support import advice
from rftmega.model_providers.output_head import decoder_of
from rftmega.model_providers.transformers_decoders import layers_of

if TYPE_CHECKING:  # imported lazily: a launcher that only validates doesn't need them
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

WEIGHT = ".weight"
EXPERTS = ".experts."  # in the names of expert parameters
ROUTERS = ("gate", "router", "shared_expert_gate")  # never get adapters


class AdaptedLayers(NamedTuple):
    """AdaptedLayers holds the layers of a model that get LoRA adapters, by module or parameter
    name.
    """

    linears: Mapping[str, nn.Linear]  # including the LM head, if targeted
    embeddings: Mapping[str, nn.Embedding]  # the token embedding, if targeted
    # fused expert parameter -> the matrices stacked by rows in each expert, by the last parts of
    # their names in the folder: (gate_proj, up_proj)
    stacks: Mapping[str, tuple[str, ...]]
    targets: frozenset[str]  # the last parts of the names of all adapted matrices


def adapted_of(
    model: "PreTrainedModel", targets: Sequence[str], *, value: bool = False
) -> AdaptedLayers:
    """Returns the layers of a decoder that `targets` (last parts of module names, such as q_proj)
    name, or all linear layers and experts if `targets` is empty.

    `value`: the model has a value head and no LM head, so the LM head is ignored among several
    targets. Raises ConfigError for a target that the model does not have, for the embedding or LM
    head of a model that ties them, for experts whose matrices transformers' conversion mapping does
    not distinguish, and for a model with a vision or audio encoder.
    """
    if vocabulary_of(model) is not decoder_of(model):
        raise ConfigError(
            f"model.lora.rank: {type(model).__name__} has a tower beside its decoder, and can't have adapters yet. Set it to 0."
        )
    words = _of_vocabulary(model)
    if value:
        targets = without_head(targets)
        words.pop(HEAD, None)
    elif model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        refuse_named(targets, OF_VOCABULARY)
        words.clear()
    layers = set(layers_of(model))
    names = [name for name, module in model.named_modules() if module in layers]
    linear = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and _is_within(name, names) and _leaf(name) not in ROUTERS
    }
    experts = _experts(model, names) if experts_targeted(targets) else {}
    known = {_leaf(name) for name in linear}.union(*experts.values())
    refuse_unknown(targets, known.union(words))
    found = frozenset(targets or known)
    linears = {name: module for name, module in linear.items() if _leaf(name) in found}
    stacks = {name: parts for name, parts in experts.items() if found & set(parts)}
    embeddings = {}
    for leaf in sorted(found.intersection(words)):
        name, module = words[leaf]
        if leaf == EMBEDDING:
            embeddings[name] = module
        else:
            linears[name] = module
    if not linears and not stacks and not embeddings:
        raise ConfigError(
            f"model.lora.rank: the layers of {type(model).__name__} have no linear layer that can have an adapter. Set it to 0."
        )
    return AdaptedLayers(linears, embeddings, stacks, found)


def pair_of(weight: str) -> tuple[str, str]:
    """Returns PEFT's names of the LoRA matrices A and B of a linear layer or embedding; `weight` is
    the name of its weight, such as model.layers.0.mlp.up_proj.weight.
    """
    return pair_names(weight.removesuffix(WEIGHT))


def module_name(weight: str) -> str:
    """Returns the last part of a layer's name, such as q_proj, from the name of its weight."""
    return _leaf(weight.removesuffix(WEIGHT))


def _of_vocabulary(model: "PreTrainedModel") -> dict[str, tuple[str, Any]]:
    """Returns the embedding and the LM head as last part of the name -> (full name, module).

    A module of an unexpected class or name is omitted.
    """
    kinds = {EMBEDDING: nn.Embedding, HEAD: nn.Linear}
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        _leaf(name): (name, module)
        for name, module in model.named_modules()
        if module in modules and type(module) is kinds.get(_leaf(name))
    }


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is_within(name: str, layers: Iterable[str]) -> bool:
    return any(name.startswith(f"{layer}.") for layer in layers)


def _experts(model: "PreTrainedModel", layers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns fused expert parameter -> names of the matrices stacked in it:
    `AdaptedLayers.stacks`.

    `layers`: names of the decoder's layers; parameters outside them are left out. Raises
    ConfigError for an expert parameter whose layout transformers does not declare.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    found = {}
    for name, parameter in model.named_parameters():
        if EXPERTS not in name or not _is_within(name, layers):
            continue
        parts = _parts(name, converters) if parameter.dim() == EXPERT_DIMENSIONS else ()
        if not parts:
            raise ConfigError(
                f"model.lora.targets: transformers keeps the experts of {type(model).__name__} in {name}, and does not say which "
                "matrices of the folder stand in it, so they can't have adapters under backend=fsdp. "
                + advice(model.config, f"Set it to [{', '.join(OF_ATTENTION[:4])}]")
            )
        found[name] = parts
    return found


def _parts(name: str, converters: "Sequence[WeightConverter]") -> tuple[str, ...]:
    """Returns the names of the matrices (such as gate_proj, up_proj) that transformers stacks by
    rows in each expert of the parameter `name`; () if transformers builds the parameter in another
    way.

    `converters`: the steps of transformers' conversion mapping for the model.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    for each in converters:
        if not any(re.search(f"{pattern}$", name) for pattern in each.target_patterns):
            continue
        below = [
            (isinstance(step, MergeModulelist) and step.dim == 0)
            or (isinstance(step, Concatenate) and step.dim == 1)
            for step in each.operations
        ]
        single = len(each.target_patterns) == 1
        merged = any(isinstance(step, MergeModulelist) for step in each.operations)
        if single and merged and all(below):
            return tuple(module_name(pattern) for pattern in each.source_patterns)
    return ()
