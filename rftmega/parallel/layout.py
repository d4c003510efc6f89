"""What follows from a layout before anything is built: arithmetic on Megatron's order of ranks, without Megatron."""

import math

from rftmega.config import ParallelConfig


def replicas(world_size: int, parallel: ParallelConfig) -> list[list[int]]:
    """Processes -> groups that each hold every parameter, as few processes as possible.

    In Megatron's order of ranks the tensor-parallel ones are neighbours, the stages are farthest apart, and the experts are
    spread over consecutive blocks of expert_tensor x expert processes.
    """
    stage = world_size // parallel.pipeline
    block = math.lcm(parallel.tensor, parallel.expert_tensor * parallel.expert)
    return [
        [first + place + stage * number for number in range(parallel.pipeline) for place in range(block)]
        for first in range(0, stage, block)
    ]


def layout_name(parallel: ParallelConfig, data: int) -> str:
    """As TP2 x PP2 x DP1, with what else is above 1."""
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "DP": data}
    more = {"VPP": parallel.virtual_pipeline, "CP": parallel.context, "EP": parallel.expert, "ETP": parallel.expert_tensor}
    sizes |= {name: size for name, size in more.items() if size > 1}
    return " x ".join(f"{name}{size}" for name, size in sizes.items())
