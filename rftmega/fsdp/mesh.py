"""ShardingMesh lays the processes out in replicas, over each of which a model is sharded."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rftmega import device
from rftmega.config import ParallelConfig

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class ShardingMesh:
    """ShardingMesh is this process's place among the processes (see `passes.model_runner.Ranks`).

    Neighbouring ranks share a replica, so that what is gathered most stays within a host.
    """

    mesh: DeviceMesh  # ("shard",), or ("replicate", "shard")
    replicas: int
    speaks: bool = True  # every process has rows of its own

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "ShardingMesh":
        """Builds the mesh over all processes. Every process calls it."""
        world = dist.get_world_size()
        kind = device.current().here().type
        if parallel.replicas == 1:
            mesh = init_device_mesh(kind, (world,), mesh_dim_names=(SHARD,))
        else:
            shape = (parallel.replicas, world // parallel.replicas)
            mesh = init_device_mesh(kind, shape, mesh_dim_names=(REPLICATE, SHARD))
        return cls(mesh, parallel.replicas)

    @property
    def data(self) -> int:
        return dist.get_world_size()

    @property
    def data_rank(self) -> int:
        return dist.get_rank()

    @property
    def shards(self) -> int:
        """Returns the number of processes that one model is sharded over."""
        return self.data // self.replicas

    @property
    def shard_rank(self) -> int:
        return self.data_rank % self.shards

    @property
    def replica(self) -> int:
        """Returns which replica this process belongs to."""
        return self.data_rank // self.shards

    def first_row(self, rows: int) -> int:
        """Returns the first of the rows that this process holds of a parameter with so many: equal
        blocks, of which the last may be short or empty.
        """
        block = -(-rows // self.shards)
        return min(self.shard_rank * block, rows)

    @property
    def shard_group(self) -> Any:
        """Returns the group of the processes that hold one whole model between them."""
        return self.mesh.get_group(SHARD)

    @property
    def layout(self) -> str:
        if self.replicas == 1:
            return f"FSDP over {self.shards}"
        return f"{self.replicas} replicas, FSDP over {self.shards} each"

    def sum_of_speakers(self, x: Tensor) -> Tensor:
        """Adds up x, in place, over all processes."""
        dist.all_reduce(x)
        return x
