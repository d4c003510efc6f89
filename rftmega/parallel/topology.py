"""Where this process stands in tensor, pipeline and data parallelism: the only reader of megatron.core.parallel_state."""

from dataclasses import dataclass
from typing import Any

import rftmega.device.before_megatron  # noqa: F401

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core import tensor_parallel
from torch import Tensor

from rftmega.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes and ranks, and the two groups that this project talks over."""

    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    data: int
    data_rank: int
    tensor_group: Any
    model_group: Any  # the tensor x pipeline processes that hold one replica

    @classmethod
    def create(cls, parallel: ParallelConfig, *, seed: int) -> "Topology":
        """Builds Megatron's process groups and seeds its generators. Call once, after torch.distributed is up."""
        state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor, pipeline_model_parallel_size=parallel.pipeline
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return cls.from_megatron()

    @classmethod
    def from_megatron(cls) -> "Topology":
        """Reads what `create` built."""
        return cls(
            tensor=state.get_tensor_model_parallel_world_size(),
            tensor_rank=state.get_tensor_model_parallel_rank(),
            pipeline=state.get_pipeline_model_parallel_world_size(),
            pipeline_rank=state.get_pipeline_model_parallel_rank(),
            data=state.get_data_parallel_world_size(),
            data_rank=state.get_data_parallel_rank(),
            tensor_group=state.get_tensor_model_parallel_group(),
            model_group=state.get_model_parallel_group(),
        )

    @staticmethod
    def destroy() -> None:
        """Forgets the groups, so that another layout can be built in the same processes."""
        state.destroy_model_parallel()

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    def sum_of_last_stages(self, x: Tensor) -> Tensor:
        """Adds up x, in place, over the data-parallel ranks' last stages; every process gets the total.

        Other stages pass a tensor of the same shape, whatever it holds.
        """
        if not (self.is_last_stage and self.tensor_rank == 0):
            x.zero_()
        dist.all_reduce(x)
        return x
