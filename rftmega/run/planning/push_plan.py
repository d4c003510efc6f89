"""Plans a weight push: which ranks send which slices, from the trainer's to the engines' layout."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from rftmega.config import ParallelConfig
from rftmega.converters import Column, Replicated, Rule, instances
from rftmega.converters.shards import holding, logical_tensor
from rftmega.core.shards import Holding, LogicalTensor
from rftmega.model_providers.description import ModelDescription, stage_layers
from rftmega.weights.engine_needs import needed_boxes
from rftmega.weights.plan import RankNeeds

Holders = tuple[tuple[Holding, tuple[int, ...]], ...]


class Engines(NamedTuple):
    """Engines is the engines' layout: `ranks` processes in engines of `tensor` each;
    `spread_experts`: each process holds whole experts instead of slices.
    """

    ranks: int
    tensor: int
    spread_experts: bool = False


class Placement(NamedTuple):
    """Placement is a tensor of the model with the ranks that hold it and the slices of it that
    engine ranks need.
    """

    rule: Rule
    tensor: LogicalTensor
    needs: RankNeeds


def placements(
    rules: Sequence[Rule],
    model: ModelDescription,
    parallel: ParallelConfig,
    world: int,
    engines: Engines,
    *,
    colocated: bool,
    dtype: Callable[[Rule], torch.dtype] = lambda rule: torch.bfloat16,
    narrow_whole: bool = False,
    layers: Collection[int] | None = None,
) -> Iterator[Placement]:
    """Yields every pushed tensor with its holders and the slices that engine ranks need.

    `rules`: how HF tensors map to Megatron tensors; `world`: number of trainer ranks; `engines`:
    the engines' layout, whose ranks are the trainer's ranks if `colocated`, else they are numbered
    after the trainer's. `dtype`: returns the dtype in which the tensor of a rule is pushed;
    `narrow_whole`: see `models_of`; `layers`: indices of the layers to include; None: all.
    """
    experts = model.experts.number if model.experts else 0
    stage_of = {
        layer: stage
        for stage, chunks in enumerate(stage_layers(model.layers, parallel))
        for c in chunks
        for layer in c
    }
    a_stage = world // parallel.pipeline
    first = 0 if colocated else world
    dense: dict[tuple[bool, int], tuple[tuple[int, ...], ...]] = {}
    for stage in range(parallel.pipeline):
        ranks = range(stage * a_stage, (stage + 1) * a_stage)
        dense[True, stage] = (tuple(ranks),)
        dense[False, stage] = tuple(
            tuple(ranks[t :: parallel.tensor]) for t in range(parallel.tensor)
        )
    mine = experts // parallel.expert
    block = parallel.expert_tensor * parallel.expert
    needs: dict[tuple[Rule, int | None], RankNeeds] = {}
    holders: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    held: dict[tuple[Rule, int], tuple[tuple[tuple[int, ...], ...], Holders]] = {}
    for rule, layer, expert in instances(rules, layers=model.layers, experts=experts):
        if not rule.exported or (layer is not None and layers is not None and layer not in layers):
            continue
        stage = (
            stage_of[layer] if layer is not None else (0 if rule.opens else parallel.pipeline - 1)
        )
        place = None  # the engine rank that holds this expert
        if expert is None:
            shards = dense[isinstance(rule, Replicated), stage]
        else:
            owner = expert // mine
            if (stage, owner) not in holders:
                begin, end = stage * a_stage + owner * parallel.expert_tensor, (stage + 1) * a_stage
                holders[stage, owner] = tuple(
                    tuple(range(begin + t, end, block)) for t in range(parallel.expert_tensor)
                )
            shards = holders[stage, owner]
            if engines.spread_experts:
                place = expert * engines.tensor // experts
        if (rule, place) not in needs:
            needs[rule, place] = tuple(
                (
                    first + rank,
                    needed_boxes(
                        rule,
                        *((0, 1) if place is not None else (rank % engines.tensor, engines.tensor)),
                    ),
                )
                for rank in range(engines.ranks)
                if place is None or rank % engines.tensor == place
            )
        if narrow_whole and isinstance(rule, Column) and rule.narrow:
            shards = (tuple(rank for ranks in shards for rank in ranks),)
        key = rule, id(shards)
        if key not in held:
            held[key] = shards, _holders(rule, shards)
        tensor = logical_tensor(rule, layer, expert, dtype(rule), held[key][1])
        yield Placement(rule, tensor, needs[rule, place])


def _holders(rule: Rule, shards: Sequence[tuple[int, ...]]) -> Holders:
    """Returns the slices of HF tensors in each shard of a Megatron tensor, with the ranks that hold
    the shard; shards that contain only padding are omitted. `rule`: the tensor's conversion rule;
    `shards`: for each shard, the ranks that hold it.
    """
    found = ((holding(rule, number, len(shards)), ranks) for number, ranks in enumerate(shards))
    return tuple((parts, ranks) for parts, ranks in found if parts)
