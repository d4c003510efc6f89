"""Derives the names and shapes of adapters from the rules of the layers that they are on: a low-rank
product b a beside a weight (LoRA, arXiv:2106.09685).

Each HF tensor has a pair of its own, as in PEFT: q, k and v, which Megatron keeps in one tensor, have
three. Megatron's `a` is theirs, one below the other; its `b` has the rows of the weight.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rftmega.converters.decoder import ATTENTION, MLP
from rftmega.converters.rules import QKV, Column, HFTensor, Replicated, Row, Rule
from rftmega.converters.vision import HEARS, MODULE
from rftmega.errors import ConfigError

WEIGHT = ".weight"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # behind the name of a module of Hugging Face's
LOCAL_DOWN, LOCAL_UP = ".lora.a", ".lora.b"  # behind that of a module of Megatron's


@dataclass(frozen=True)
class AdaptedLayer:
    """AdaptedLayer is the rule of a linear layer's weight, and those of the adapter on it."""

    base: Rule
    parts: tuple[int, ...]  # which of the base's HF tensors have a pair
    down: Rule  # of `a`
    up: Rule  # of `b`, whose rows of other HF tensors are zeros

    @property
    def row_parallel(self) -> bool:
        return isinstance(self.base, Row)

    @property
    def targets(self) -> tuple[str, ...]:
        """Returns the names of the HF modules that have a pair."""
        return tuple(hf_target(self.base, part) for part in self.parts)


def adapted_layers(
    rules: Sequence[Rule], *, rank: int, targets: Sequence[str]
) -> list[AdaptedLayer]:
    """Returns the layers of a decoder that `targets` name, all linear ones where it is empty.

    Raises ConfigError for a target that the model does not have, and for a model that can have no
    adapters.
    """
    if any(rule.megatron[0].startswith((MODULE, HEARS)) for rule in rules):
        raise ConfigError(
            "model.lora.rank: the model has a tower that sees or hears, and can't have adapters yet. Set it to 0."
        )
    linear = [rule for rule in rules if _is_linear(rule)]
    if not any(isinstance(rule, QKV) for rule in linear):
        raise ConfigError(
            "model.lora.rank: the model has latent attention, whose layers can't have adapters. Set it to 0."
        )
    names = {name for rule in linear for name in _names(rule)}
    refuse_unknown(targets, names)
    found = []
    for rule in linear:
        numbers = range(len(rule.hf))
        chosen = [number for number in numbers if _is_chosen(rule, number, targets)]
        if chosen:
            found.append(_adapted(rule, tuple(chosen), rank))
    return found


def refuse_unknown(targets: Sequence[str], names: Collection[str]) -> None:
    """Raises ConfigError for targets that are not among the `names` of a model's layers."""
    if unknown := [target for target in targets if target not in names]:
        raise ConfigError(
            f"model.lora.targets: {', '.join(unknown)} can't have an adapter in this model. "
            f"Choose from: {', '.join(sorted(names))}."
        )


def hf_target(rule: Rule, number: int) -> str:
    """Returns the name of one of a weight's HF modules, such as q_proj."""
    return rule.hf[number].name.removesuffix(WEIGHT).rsplit(".", 1)[1]


def _megatron_target(rule: Rule) -> str:
    return rule.megatron[0].removesuffix(WEIGHT).rsplit(".", 1)[1]


def _names(rule: Rule) -> set[str]:
    found = {hf_target(rule, number) for number in range(len(rule.hf))}
    return found | {_megatron_target(rule)}


def _is_linear(rule: Rule) -> bool:
    """Says whether this is the weight of a linear layer of a decoder's attention or MLP, or of an
    expert.
    """
    of_a_layer = rule.megatron[0].startswith((ATTENTION, MLP))
    named = rule.megatron[0].endswith(WEIGHT) and len(rule.hf[0].shape) == 2
    return of_a_layer and named and isinstance(rule, Column | QKV)


def _is_chosen(rule: Rule, number: int, targets: Sequence[str]) -> bool:
    named = (hf_target(rule, number), _megatron_target(rule))
    return not targets or any(name in targets for name in named)


def _adapted(rule: Rule, parts: tuple[int, ...], rank: int) -> AdaptedLayer:
    down = [_beside(rule.hf[part], DOWN, (rank, rule.hf[part].shape[1])) for part in parts]
    up = [_beside(tensor, UP, (tensor.shape[0], rank)) for tensor in rule.hf]
    # of Megatron's own modules; nothing looks adapters up by these names
    of_a, of_b = (
        (rule.megatron[0].removesuffix(WEIGHT) + name,) for name in (LOCAL_DOWN, LOCAL_UP)
    )
    if isinstance(rule, Row):  # columns of a row-parallel weight are split, and with them a's
        return AdaptedLayer(
            rule,
            parts,
            replace(rule, megatron=of_a, hf=tuple(down)),
            Replicated(of_b, tuple(up), layers=rule.layers),
        )
    return AdaptedLayer(
        rule,
        parts,
        Column(of_a, tuple(down), layers=rule.layers),  # whole on every rank
        replace(rule, megatron=of_b, hf=tuple(up)),
    )


def _beside(tensor: HFTensor, name: str, shape: tuple[int, ...]) -> HFTensor:
    return HFTensor(tensor.name.removesuffix(WEIGHT) + name, shape)
