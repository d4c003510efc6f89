"""Finds the linear layers of a transformers model that have an adapter: a low-rank product B A beside
the weight (LoRA, arXiv:2106.09685), named as PEFT names it.
"""

from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel

from rftmega.converters.adapters import DOWN, UP, refuse_unknown
from rftmega.errors import ConfigError
from rftmega.hf_folders.meta_decoder import layers_of, words_of
from rftmega.options.adapters import OF_ATTENTION, experts_targeted

WEIGHT = ".weight"
EXPERTS = ".experts."  # in the name of what belongs to an expert


def linears_of(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Returns the linear layers of a decoder that `targets` name, all where it is empty, by their
    names in the model.

    Raises ConfigError for a target that the model does not have, for experts, which transformers
    keeps in one tensor a layer, and for a model with a tower.
    """
    if words_of(model) is not model.base_model:
        raise ConfigError(
            f"model.lora.rank: {type(model).__name__} has a tower beside its decoder, and can't have adapters yet. Set it to 0."
        )
    layers = set(layers_of(model))
    names = [name for name, module in model.named_modules() if module in layers]
    if experts_targeted(targets) and (found := _experts(model, names)):
        raise ConfigError(
            f"model.lora.targets: transformers keeps the experts of {type(model).__name__} in one tensor ({found}), which can't "
            f"have adapters under backend=fsdp. Set it to [{', '.join(OF_ATTENTION[:4])}], or take backend=megatron."
        )
    linear = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and _is_within(name, names)
    }
    refuse_unknown(targets, {_leaf(name) for name in linear})
    chosen = {
        name: module for name, module in linear.items() if not targets or _leaf(name) in targets
    }
    if not chosen:
        raise ConfigError(
            f"model.lora.rank: the layers of {type(model).__name__} have no linear layer that can have an adapter. Set it to 0."
        )
    return chosen


def pair_of(weight: str) -> tuple[str, str]:
    """Returns the names of A and B beside the weight of a linear layer."""
    layer = weight.removesuffix(WEIGHT)
    return layer + DOWN, layer + UP


def targets_of(layers: Iterable[str]) -> frozenset[str]:
    """Returns the last parts of the names of layers, such as q_proj."""
    return frozenset(_leaf(name) for name in layers)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is_within(name: str, layers: Iterable[str]) -> bool:
    return any(name.startswith(f"{layer}.") for layer in layers)


def _experts(model: PreTrainedModel, layers: Sequence[str]) -> str:
    """Returns the name of the first parameter of experts; "" where there is none."""
    for name, _ in model.named_parameters():
        if EXPERTS in name and _is_within(name, layers):
            return name
    return ""
