"""Computes which tensor shards a process holds, from the parallel layout alone, without building a
model or communicating.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rftmega.config import ParallelConfig
from rftmega.converters import Replicated, Rule, instances
from rftmega.model_providers.description import ModelDescription, stage_layers


class Holding(NamedTuple):
    """Holding identifies shard `rank` of `ranks` of the Megatron tensor that `rule` describes.
    `layer` and `expert`: its indices in the whole model, None for tensors outside layers or
    experts.
    """

    rule: Rule
    layer: int | None
    expert: int | None
    rank: int
    ranks: int


def holdings(
    rules: Sequence[Rule],
    model: ModelDescription,
    parallel: ParallelConfig,
    *,
    stage: int,
    tensor_rank: int,
    expert_rank: int,
    expert_tensor_rank: int,
) -> Iterator[Holding]:
    """Yields a Holding for every shard that one process holds, for models of Megatron's own modules
    (not Transformer Engine's).

    `rules`: the model's Megatron tensors and their HF tensors. `stage`, `tensor_rank`,
    `expert_rank`, `expert_tensor_rank`: the process's indices along pipeline, tensor, expert and
    expert-tensor parallelism. Raises ValueError if the layout does not fit the model; using a
    yielded rule raises WeightMismatch if its tensor can't be split.
    """
    layers = {layer for chunk in stage_layers(model.layers, parallel)[stage] for layer in chunk}
    experts = model.experts.number if model.experts else 0
    each = experts // parallel.expert
    for rule, layer, expert in instances(rules, layers=model.layers, experts=experts):
        if layer is None:
            if stage != (0 if rule.opens else parallel.pipeline - 1) or (
                not rule.exported and stage == 0
            ):
                continue  # tied, and this stage holds the embedding itself
        elif layer not in layers or (expert is not None and expert // each != expert_rank):
            continue
        shard = (
            (tensor_rank, parallel.tensor)
            if expert is None
            else (expert_tensor_rank, parallel.expert_tensor)
        )
        yield Holding(rule, layer, expert, *((0, 1) if isinstance(rule, Replicated) else shard))
