"""Conversion rules of vision and audio encoders: each tensor is replicated and has transformers'
own name.
Every tensor-parallel process of the first pipeline stage holds the whole encoder.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rftmega.converters.rules import HFTensor, Replicated, Rule, Vocabulary
from rftmega.core.errors import CheckpointError

Tower = Mapping[str, Any]  # vision_config or audio_config, completed
Shapes = Iterator[tuple[str, tuple[int, ...]]]
MODULE = "visual."  # prefix in our model
AUDIO = "audio."


def renamed(rules: list[Rule], prefix: str) -> list[Rule]:
    """Returns the decoder's rules with the prefix "model." of their HF names replaced by `prefix`."""
    return [_renamed(rule, prefix) for rule in rules]


def _renamed(rule: Rule, prefix: str) -> Rule:
    tensors = []
    for tensor in rule.hf:
        inside = tensor.name.startswith("model.")
        name = prefix + tensor.name.removeprefix("model.") if inside else tensor.name
        tensors.append(tensor._replace(name=name))
    return replace(rule, hf=tuple(tensors))


def tower_rules(shapes: Shapes, prefix: str) -> list[Rule]:
    """Returns the conversion rules of a vision encoder's tensors.

    `shapes`: their names and shapes; `prefix`: the prefix of these names in a Hugging Face folder.
    """
    return [
        Replicated((MODULE + name,), (HFTensor(prefix + name, shape),)) for name, shape in shapes
    ]


def audio_tower_rules(shapes: Shapes) -> list[Rule]:
    """Returns the conversion rules of an audio encoder's tensors; `shapes`: their names and shapes."""
    return [Replicated((AUDIO + name,), (HFTensor(name, shape),)) for name, shape in shapes]


def is_of_tower(rule: Rule) -> bool:
    return rule.megatron[0].startswith((MODULE, AUDIO))


def embedding_name(rules: list[Rule]) -> str:
    """Returns the Hugging Face name of the embedding's weight, which is found among the model's
    rules.
    """
    first = next(rule for rule in rules if isinstance(rule, Vocabulary))
    return first.hf[0].name


def count_of(shapes: Shapes) -> int:
    """Returns the total number of elements of tensors with these shapes."""
    return sum(math.prod(shape) for _, shape in shapes)


def linear(name: str, out: int, inputs: int) -> Shapes:
    """Yields the name and shape of a linear layer's weight [out, inputs] and of its bias [out];
    `name`: the layer's name.
    """
    yield f"{name}.weight", (out, inputs)
    yield f"{name}.bias", (out,)


def layer_norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def patches(tower: Tower, width: int) -> tuple[int, ...]:
    """Returns the shape of the patch embedding's weight, a 3D convolution.

    `tower`: the vision encoder's config; `width`: its hidden size.
    """
    side = tower["patch_size"]
    return width, tower["in_channels"], tower["temporal_patch_size"], side, side


def check(tower: Tower, width: int, out: int, hidden: int) -> None:
    """Raises CheckpointError for a vision encoder whose config is inconsistent, in itself or with
    the decoder.

    `tower`: its config; `width`: its hidden size; `out`: size of its output features; `hidden`: the
    decoder's hidden size.
    """
    if width % tower["num_heads"] or width // tower["num_heads"] % 4:
        raise CheckpointError(
            f"vision_config: {tower['num_heads']} heads can't share a width of {width}: a head's must be a multiple of 4."
        )
    if out != hidden:
        raise CheckpointError(
            f"vision_config gives features of width {out}, and the decoder's hidden_size is {hidden}."
        )
    for name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if any(layer >= tower["depth"] for layer in tower.get(name, ())):
            raise CheckpointError(
                f"vision_config: {name}={tower[name]} names a layer beyond depth={tower['depth']}."
            )
