"""Derives the names and shapes of LoRA adapters (arXiv:2106.09685) from the conversion rules of the
adapted layers; an adapter adds a low-rank product b a to a weight.
Each HF tensor has a separate pair of matrices, as in PEFT: q, k and v, one tensor in Megatron, have
three pairs. Megatron's `a` concatenates the first matrices of these pairs along the rows; its `b`
has the rows of the weight. An embedding has a pair for the transposed weight: `a` [rank,
vocabulary] is looked up by token, and its columns are split like the vocabulary; every process
holds all of `b` [hidden, rank].
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rftmega.converters.decoder import ATTENTION, MLP, is_of_value_head
from rftmega.converters.rules import (
    QKV,
    Column,
    HFTensor,
    Replicated,
    Row,
    Rule,
    Vocabulary,
    VocabularyColumns,
)
from rftmega.converters.vision import AUDIO, MODULE
from rftmega.core.errors import ConfigError
from rftmega.core.shards import EMBEDDING, HEAD

HEADS = (HEAD, "output_layer")  # Hugging Face's and Megatron's name
WEIGHT = ".weight"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # suffixes of a Hugging Face module's name
EMBEDDING_DOWN, EMBEDDING_UP = ".lora_embedding_A", ".lora_embedding_B"
DOWNS, UPS = (DOWN, EMBEDDING_DOWN), (UP, EMBEDDING_UP)
LOCAL_DOWN, LOCAL_UP = ".lora.a", ".lora.b"  # suffixes of a Megatron module's name


@dataclass(frozen=True)
class AdaptedLayer:
    """AdaptedLayer describes a layer with a LoRA adapter: the conversion rule of the layer's
    weight, and those of the adapter's two matrices, a (`down`) and b (`up`).
    """

    base: Rule
    parts: tuple[int, ...]  # indices of the base's HF tensors that have a pair
    down: Rule  # of `a`
    up: Rule  # of `b`, whose rows for other HF tensors are zeros

    @property
    def of_embedding(self) -> bool:
        return isinstance(self.down, VocabularyColumns)

    @property
    def of_head(self) -> bool:
        return isinstance(self.base, Vocabulary) and not self.of_embedding

    @property
    def row_parallel(self) -> bool:
        """Returns whether each tensor-parallel process holds a slice of the columns of the
        adapter's matrix `a`, and all of matrix `b`, as for a row-parallel linear layer.
        """
        return isinstance(self.base, Row) or self.of_embedding

    @property
    def targets(self) -> tuple[str, ...]:
        """Returns the names of the layer's HF modules that have a LoRA pair, e.g. ("q_proj",
        "v_proj") for a fused QKV layer.
        """
        return tuple(hf_target(self.base, part) for part in self.parts)


def adapted_layers(
    rules: Sequence[Rule], *, rank: int, targets: Sequence[str]
) -> list[AdaptedLayer]:
    """Returns the decoder layers that get a LoRA adapter: those that `targets` name or, if it is
    empty, all linear layers of attention, MLP and experts.

    `rules`: conversion rules of the model; `rank`: LoRA rank; `targets`: names of HF or Megatron
    modules, such as q_proj or linear_qkv. A value model has no LM head: if `targets` name the LM
    head among other layers, it is ignored. Raises ConfigError for a target that the model does not
    have, for the embedding or the LM head of a model that ties them, and for a model that cannot
    have adapters.
    """
    if any(rule.megatron[0].startswith((MODULE, AUDIO)) for rule in rules):
        raise ConfigError(
            "model.lora.rank: the model has a tower that sees or hears, and can't have adapters yet. Set it to 0."
        )
    linear = [rule for rule in rules if _is_linear(rule)]
    if not any(isinstance(rule, QKV) for rule in linear):
        raise ConfigError(
            "model.lora.rank: the model has latent attention, whose layers can't have adapters. Set it to 0."
        )
    of_vocabulary = [rule for rule in rules if isinstance(rule, Vocabulary)]
    _refuse_tied(of_vocabulary, targets)
    if any(map(is_of_value_head, rules)):
        targets = without_head(targets)
    adaptable = linear + (of_vocabulary if targets and not _are_tied(of_vocabulary) else [])
    refuse_unknown(targets, {name for rule in adaptable for name in _names(rule)})
    found = []
    for rule in adaptable:
        numbers = range(len(rule.hf))
        chosen = [number for number in numbers if _is_chosen(rule, number, targets)]
        if chosen:
            found.append(_adapted(rule, tuple(chosen), rank))
    return found


def _refuse_tied(of_vocabulary: Sequence[Rule], targets: Sequence[str]) -> None:
    """Raises ConfigError if `targets` name the embedding or the LM head of a model that ties them.

    `of_vocabulary`: the conversion rules of embedding and LM head.
    """
    known = {*HEADS, *(name for rule in of_vocabulary for name in _names(rule))}
    if _are_tied(of_vocabulary):
        refuse_named(targets, known)


def refuse_named(targets: Sequence[str], words: Collection[str]) -> None:
    """Raises ConfigError if `targets` name the embedding or the LM head, for a model that ties
    them.

    `words`: all names of these two modules.
    """
    if named := [target for target in targets if target in words]:
        raise ConfigError(
            f"model.lora.targets: {', '.join(named)}: the model's output head is its embedding (tie_word_embeddings=true), and "
            "an adapter on one of them alone would make them two. Leave it out, or untie the folder first: write the embedding "
            "as lm_head.weight as well, and set tie_word_embeddings to false."
        )


def _are_tied(of_vocabulary: Sequence[Rule]) -> bool:
    return any(not rule.exported for rule in of_vocabulary)


def without_head(targets: Sequence[str]) -> list[str]:
    """Returns `targets` without the LM head, for a value model, which has none.

    Raises ConfigError if no target remains.
    """
    kept = [target for target in targets if target not in HEADS]
    if targets and not kept:
        raise ConfigError(
            f"model.lora.targets: {', '.join(targets)} is all that is named, and a value model has no output head. Name layers "
            "of attention or MLP as well."
        )
    return kept


def refuse_unknown(targets: Sequence[str], names: Collection[str]) -> None:
    """Raises ConfigError if one of `targets` is not among `names`, the modules of the model that
    can have adapters.
    """
    if unknown := [target for target in targets if target not in names]:
        raise ConfigError(
            f"model.lora.targets: {', '.join(unknown)} can't have an adapter in this model. "
            f"Choose from: {', '.join(sorted(names))}."
        )


def hf_target(rule: Rule, number: int) -> str:
    """Returns the module name, such as q_proj, of the HF tensor with index `number` in `rule.hf`."""
    return _leaf(rule.hf[number].name.removesuffix(WEIGHT))


def module_of(name: str) -> str:
    """Returns the full name of the module to which the adapter tensor `name` belongs."""
    for ending in (*DOWNS, *UPS):
        name = name.removesuffix(ending)
    return name


def target_of(name: str) -> str:
    """Returns the last part of the name, such as q_proj, of the module to which the adapter tensor
    `name` belongs.
    """
    return _leaf(module_of(name))


def pair_names(module: str) -> tuple[str, str]:
    """Returns PEFT's names of the matrices A and B of a module's adapter."""
    if _leaf(module) == EMBEDDING:
        return module + EMBEDDING_DOWN, module + EMBEDDING_UP
    return module + DOWN, module + UP


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _megatron_target(rule: Rule) -> str:
    return _leaf(rule.megatron[0].removesuffix(WEIGHT))


def _names(rule: Rule) -> set[str]:
    found = {hf_target(rule, number) for number in range(len(rule.hf))}
    return found | {_megatron_target(rule)}


def _is_linear(rule: Rule) -> bool:
    """Returns whether a rule describes the weight of a linear layer in a decoder's attention, MLP
    or experts.
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
    # names within Megatron's modules; adapters are never looked up by them
    of_a, of_b = (
        (rule.megatron[0].removesuffix(WEIGHT) + name,) for name in (LOCAL_DOWN, LOCAL_UP)
    )
    if _is_embedding(rule):
        (table,) = rule.hf
        words, hidden = table.shape
        return AdaptedLayer(
            rule,
            parts,
            VocabularyColumns(of_a, (_beside(table, EMBEDDING_DOWN, (rank, words)),)),
            Replicated(of_b, (_beside(table, EMBEDDING_UP, (hidden, rank)),)),
        )
    if isinstance(
        rule, Row
    ):  # the columns of a row-parallel weight are split, and so are those of a
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


def _is_embedding(rule: Rule) -> bool:
    return isinstance(rule, Vocabulary) and rule.opens


def _beside(tensor: HFTensor, name: str, shape: tuple[int, ...]) -> HFTensor:
    return HFTensor(tensor.name.removesuffix(WEIGHT) + name, shape)
