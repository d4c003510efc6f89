"""Computes properties of a parallel layout before anything is built: arithmetic on Megatron's order
of ranks, without Megatron.
"""

import math
from typing import NamedTuple

from rftmega.config import ParallelConfig


class RankCoordinates(NamedTuple):
    """RankCoordinates is a process's position in a layout: its pipeline stage, and its tensor-,
    expert- and expert-tensor-parallel ranks.
    """

    stage: int
    tensor_rank: int
    expert_rank: int
    expert_tensor_rank: int


def place_of(rank: int, world_size: int, parallel: ParallelConfig) -> RankCoordinates:
    """Returns the coordinates of a rank in Megatron's order: tensor fastest, then context, data,
    pipeline.

    Among experts tensor, then expert.
    """
    stage, within = divmod(rank, world_size // parallel.pipeline)
    return RankCoordinates(
        stage,
        within % parallel.tensor,
        within // parallel.expert_tensor % parallel.expert,
        within % parallel.expert_tensor,
    )


def copies(world_size: int, parallel: ParallelConfig, *, experts: bool) -> tuple[int, int]:
    """Returns the number of processes that hold the same dense parameters, and the same experts (1
    without experts).
    """
    stage = world_size // parallel.pipeline
    of_experts = stage // (parallel.expert * parallel.expert_tensor)
    return stage // parallel.tensor, of_experts if experts else 1


def replicas(world_size: int, parallel: ParallelConfig) -> list[list[int]]:
    """Splits processes into the smallest groups that each hold every parameter.

    In Megatron's order of ranks the tensor-parallel ones are neighbours, the stages are farthest
    apart, and the experts are distributed over consecutive blocks of expert_tensor x expert
    processes.
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
    """Returns the name of a layout, e.g. TP2 x PP2 x DP1, with the other sizes that are above 1."""
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
    """Returns the number of nodes that an engine of `ranks` consecutive ranks spans, with `node`
    ranks per node.

    0: its ranks would share a node with others while they lie on several, which no vLLM engine
    supports.
    """
    if node % ranks == 0:
        return 1
    return ranks // node if ranks % node == 0 else 0
