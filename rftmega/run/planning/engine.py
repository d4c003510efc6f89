"""Predicts the memory of an engine process: its shard of the weights, its KV cache,
working memory.
"""

from functools import lru_cache
from math import prod

from rftmega.config import RolloutConfig
from rftmega.converters import Rule
from rftmega.core.shards import is_linear, volume
from rftmega.model_providers.description import ModelDescription
from rftmega.run.planning.models import PlannedModel
from rftmega.weights.engine_needs import needed_boxes

FP8_BYTES = 1 + 4 / 128**2  # bytes of a number and its share of a scale
BATCHED = 8192  # tokens of one forward pass of vLLM


def weight_bytes(
    planned: PlannedModel, ranks: int, itemsize: int = 2, *, quantization: str = "none"
) -> int:
    """Returns the bytes of weights on the fullest process of an engine that is sharded over `ranks`
    processes; `itemsize`: bytes of a weight that is not quantized; `quantization`: value of
    rollout.quantization.
    """
    if not planned.rules:
        return itemsize * _by_shapes(planned, ranks)
    experts = planned.model.experts.number if planned.model.experts else 0
    total = 0.0
    for rule in planned.rules:
        if rule.exported:
            layers = sum(map(rule.speaks_of, range(planned.model.layers))) if rule.per_layer else 1
            fp8 = quantization != "none" and all(map(is_linear, rule.hf_names(0, 0)))
            size = FP8_BYTES if fp8 else itemsize
            total += layers * (experts if rule.per_expert else 1) * _elements(rule, ranks) * size
    return int(total)


def held_bytes(planned: PlannedModel, rollout: RolloutConfig) -> int:
    """Returns the bytes of weights on the fullest process of each engine of a run."""
    return weight_bytes(planned, rollout.tensor, quantization=rollout.quantization)


def _by_shapes(planned: PlannedModel, ranks: int) -> int:
    """Returns the number of weight elements on one of `ranks` engine processes, for a model without
    a conversion table: matrices are sharded, vectors are not.
    """
    assert planned.groups is not None
    shapes = [shape for group in planned.groups.apart for shape in group]
    shapes += planned.groups.whole_pass
    return sum(prod(shape) // (ranks if len(shape) > 1 else 1) for shape in shapes)


@lru_cache(4096)
def _elements(rule: Rule, ranks: int) -> int:
    return sum(volume(box) for _, box in needed_boxes(rule, 0, ranks))


def cache_bytes(model: ModelDescription, ranks: int, itemsize: int = 2) -> int:
    """Returns the bytes that a token takes in the KV cache of one of an engine's `ranks` processes;
    `itemsize`: bytes of a cached number.

    With latent attention every process stores the whole compressed vector. A gated delta net stores
    nothing for a token.
    """
    if model.latent:
        return model.layers * (model.latent.key_value_rank + model.latent.rope_dim) * itemsize
    return model.attention_layers * 2 * max(1, model.groups // ranks) * model.head_dim * itemsize


def working_bytes(model: ModelDescription, ranks: int, sequences: int, itemsize: int = 2) -> int:
    """Returns the working memory of one of an engine's `ranks` processes in bytes: activations of
    `BATCHED` tokens (`itemsize` bytes each), and logits and probabilities (float32) for one token
    of each of `sequences` sequences.
    """
    wide = model.mlp_matrices * model.ffn // ranks
    if model.experts:
        wide = max(
            wide,
            3 * model.experts.active * model.experts.ffn // ranks
            + model.experts.active * model.hidden,
        )
    return BATCHED * (4 * model.hidden + wide) * itemsize + sequences * model.vocabulary * 8
