"""Computes properties of a parallel layout before anything is built, by arithmetic on Megatron's
rank order, without importing Megatron.
"""

import math
from typing import NamedTuple

from rftmega.config import ParallelConfig


class RankCoordinates(NamedTuple):
    """RankCoordinates holds a process's ranks in a parallel layout: its pipeline stage, and its
    tensor-, expert- and expert-tensor-parallel ranks.
    """

    stage: int
    tensor_rank: int
    expert_rank: int
    expert_tensor_rank: int


def place_of(rank: int, world_size: int, parallel: ParallelConfig) -> RankCoordinates:
    """Returns the coordinates of a rank in the layout `parallel`, by Megatron's rank order: tensor
    parallelism varies fastest, then context, data and pipeline.

    For expert layers, expert-tensor parallelism varies fastest, then expert.
    """
    stage, within = divmod(rank, world_size // parallel.pipeline)
    return RankCoordinates(
        stage,
        within % parallel.tensor,
        within // parallel.expert_tensor % parallel.expert,
        within % parallel.expert_tensor,
    )


def copies(world_size: int, parallel: ParallelConfig, *, experts: bool) -> tuple[int, int]:
    """Returns (number of processes that hold the same dense parameters, number of processes that
    hold the same experts); the second is 1 if `experts` is False.

    `experts`: whether the model has experts.
    """
    stage = world_size // parallel.pipeline
    of_experts = stage // (parallel.expert * parallel.expert_tensor)
    return stage // parallel.tensor, of_experts if experts else 1


def replicas(world_size: int, parallel: ParallelConfig) -> list[list[int]]:
    """Returns the ranks, divided into the smallest groups whose processes together hold every
    parameter.

    In Megatron's rank order tensor-parallel ranks are neighbours, pipeline stages are farthest
    apart, and experts are distributed over consecutive blocks of expert_tensor x expert ranks.
    """
    stage = world_size // parallel.pipeline
    block = math.lcm(parallel.tensor, parallel.expert_tensor * parallel.expert)
    return [
        [
            first + place + stage * number
            for number in range(parallel.pipeline)
            for place in range(block)
        ]
        for first in range(0, stage, block)
    ]


def layout_name(parallel: ParallelConfig, data: int) -> str:
    """Returns the name of a layout, e.g. TP2 x PP2 x DP1; virtual pipeline, context, expert and
    expert-tensor sizes are appended if above 1.

    `data`: data-parallel size.
    """
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "DP": data}
    more = {
        "VPP": parallel.virtual_pipeline,
        "CP": parallel.context,
        "EP": parallel.expert,
        "ETP": parallel.expert_tensor,
    }
    sizes |= {name: size for name, size in more.items() if size > 1}
    return " x ".join(f"{name}{size}" for name, size in sizes.items())


def nodes_of_engine(ranks: int, node: int) -> int:
    """Returns the number of nodes that a rollout engine of `ranks` consecutive ranks spans.

    `node`: number of ranks per node. Returns 0 for a placement that vLLM engines don't support: the
    engine spans several nodes but shares one with another engine.
    """
    if node % ranks == 0:
        return 1
    return ranks // node if ranks % node == 0 else 0
