"""Predicts the bytes of weights, gradients, main parameters and Adam on one process, as Megatron
0.16 allocates them (`sharded`: as FSDP2 does).

Gradients are in one float32 buffer per chunk of layers, and another for the experts of the chunk.
The distributed optimizer also stores the weights in a buffer, starts each parameter at a multiple of
64 elements, pads the end to a multiple of 128 and of the number of processes that share the buffer,
and assigns each of these processes an equal part of main parameters and Adam's two moments.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from rftmega.converters import Rule, shard_shape
from rftmega.converters.adapters import LOCAL_DOWN
from rftmega.converters.decoder import is_of_value_head
from rftmega.converters.rules import Column, Row, VocabularyColumns
from rftmega.converters.vision import is_of_tower
from rftmega.model_providers.description import ModelDescription, stage_layers
from rftmega.run.planning import sharded
from rftmega.run.planning.models import (
    ADAM,
    GRADIENTS,
    MAIN_PARAMETERS,
    PARAMETERS,
    POLICY,
    STATES,
    PlannedModel,
)
from rftmega.runtime.parallel.layout import copies

BUFFERS = ("router.expert_bias",)  # Megatron's buffers that count as weights but are not trained
# bytes of Adam's two moments per parameter; 8-bit moments have a scale per 256 of them
MOMENTS = {"float32": 8, "bfloat16": 4, "8bit": 2 + 2 * 4 / 256}
START, END = 64, 128  # elements to which parameters, and buffers, are aligned


class Chunk(NamedTuple):
    """Chunk counts the parameters of one chunk of layers on one process: number of elements ->
    number of parameters with so many elements. The parameters of experts are counted separately.
    """

    dense: Counter[int]
    experts: Counter[int]


def chunks_of(planned: PlannedModel, stage: int) -> list[Chunk]:
    """Returns the parameter counts of each chunk of layers on one process of pipeline stage `stage`
    (several chunks with virtual pipeline stages); all processes of a stage have equal shards.

    Raises ValueError or WeightMismatch for an invalid layout.
    """
    parallel = planned.parallel
    chunks = stage_layers(planned.model.layers, parallel)[stage]
    ends = (stage == 0, stage == parallel.pipeline - 1)
    return [
        _chunk(
            planned,
            layers,
            opens=ends[0] and number == 0,
            closes=ends[1] and number == len(chunks) - 1,
        )
        for number, layers in enumerate(chunks)
    ]


def _chunk(planned: PlannedModel, layers: range, *, opens: bool, closes: bool) -> Chunk:
    parallel, found = planned.parallel, Chunk(Counter(), Counter())
    for rule in planned.rules:
        if rule.megatron[0].endswith(BUFFERS):
            continue
        number = (
            sum(map(rule.speaks_of, layers))
            if rule.per_layer
            else int(opens if rule.opens else closes)
        )
        if not rule.exported and opens:
            number = 0  # tied to the embedding, which this process holds
        ranks = parallel.expert_tensor if rule.per_expert else parallel.tensor
        if rule.per_expert:
            number *= _experts(planned.model) // parallel.expert
        if rule.megatron[0].endswith(LOCAL_DOWN) and not isinstance(rule, Row | VocabularyColumns):
            ranks = 1  # an adapter's first matrix on a column-parallel layer
        if planned.narrow_whole and isinstance(rule, Column) and rule.narrow:
            ranks = 1
        if number:
            (found.experts if rule.per_expert else found.dense)[_elements(rule, ranks)] += number
    return found


@lru_cache(4096)
def _elements(rule: Rule, ranks: int) -> int:
    return shard_shape(rule, 0, ranks).numel()


def _experts(model: ModelDescription) -> int:
    return model.experts.number if model.experts else 0


def elements_of(planned: PlannedModel, stage: int) -> int:
    """Returns the number of parameter elements on one process of a pipeline stage (Megatron)."""
    return sum(
        size * number
        for chunk in chunks_of(planned, stage)
        for sizes in chunk
        for size, number in sizes.items()
    )


def sharers(planned: PlannedModel, world: int) -> tuple[int, int]:
    """Returns (number of processes that hold the same dense parameters, number that hold the same
    experts); such processes share the states of a distributed optimizer.
    """
    return copies(world, planned.parallel, experts=planned.model.experts is not None)


def states(planned: PlannedModel, world: int, stage: int) -> dict[str, int]:
    """Returns how many bytes of parameters, gradients, main parameters and Adam states one process
    of pipeline stage `stage` holds, by kind. Adam's states are counted as after the first step.
    `world`: number of trainer processes.
    """
    if planned.groups is not None:
        return sharded.states(planned, world)
    optimizer, totals = planned.optimizer, dict.fromkeys(STATES, 0)
    if planned.adapted:
        totals[PARAMETERS] += frozen_bytes(planned, stage)
        planned = alone(planned)
    several = max(sharers(planned, world))
    for size, elements, shared_by in _buffers(planned, world, stage):
        split = optimizer is not None and optimizer.shards_states(several)
        totals[PARAMETERS] += planned.itemsize * (size if split else elements)
        if optimizer is None:
            continue
        totals[GRADIENTS] += 4 * (size if split else elements)
        own = math.ceil(elements / shared_by) if split else elements
        totals[MAIN_PARAMETERS] += 4 * own if planned.itemsize < 4 else 0
        totals[ADAM] += int(MOMENTS[optimizer.states] * own)
    totals[PARAMETERS] += planned.itemsize * _outside_buffers(planned, stage)
    return totals


def frozen_bytes(planned: PlannedModel, stage: int) -> int:
    """Returns the bytes of a model's frozen weights on one process of a stage; 0 for a model without
    adapters.
    """
    rules = [rule for rule in planned.rules if planned.adapted and not is_of_value_head(rule)]
    return planned.itemsize * elements_of(replace(planned, rules=rules), stage)


def shared_bytes(models: Mapping[str, PlannedModel], stages: Mapping[str, int]) -> int:
    """Returns the bytes of frozen weights that policy and critic share on one process.

    `stages`: model name -> pipeline stage of the process.
    """
    policy, critic = models[POLICY], models.get("critic", models[POLICY])
    alike = (critic.path, critic.parallel) == (policy.path, policy.parallel)
    return frozen_bytes(critic, stages["critic"]) if alike and critic is not policy else 0


def alone(planned: PlannedModel) -> PlannedModel:
    """Returns a PlannedModel of the trained weights alone of a model with adapters: the adapters
    and the value head.
    """
    rules = [rule for layer in planned.adapted for rule in (layer.down, layer.up)]
    return replace(planned, rules=[*rules, *filter(is_of_value_head, planned.rules)], adapted=())


def _outside_buffers(planned: PlannedModel, stage: int) -> int:
    """Returns the number of parameter elements of a trained model that get no gradient on one
    process of a stage: those of a frozen vision tower.
    """
    if stage or not planned.frozen_tower or planned.optimizer is None or not planned.model.tower:
        return 0
    return planned.model.tower.parameters


def _buffers(planned: PlannedModel, world: int, stage: int) -> Iterator[tuple[int, int, int]]:
    """Yields, for each gradient buffer, its number of elements with padding, its number without, and
    the number of processes that share it.
    """
    shared_by = sharers(planned, world)
    if _outside_buffers(planned, stage):
        learning = [rule for rule in planned.rules if not is_of_tower(rule)]
        planned = replace(planned, rules=learning)
    for chunk in chunks_of(planned, stage):
        for sizes, processes in zip(chunk, shared_by, strict=True):
            if sizes:
                aligned = sum(-(-size // START) * START * number for size, number in sizes.items())
                end = math.lcm(processes, END)
                yield (
                    -(-aligned // end) * end,
                    sum(size * number for size, number in sizes.items()),
                    processes,
                )
