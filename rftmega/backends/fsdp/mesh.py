"""ShardingMesh arranges the processes in replicas; each replica holds one sharded copy of the
model.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rftmega.config import ParallelConfig
from rftmega.runtime import device

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True)
class ShardingMesh:
    """ShardingMesh is this process's position among the replicas, shards and tensor-parallel
    processes; it implements `runner.model_runner.Ranks`.
    Consecutive ranks form a tensor-parallel group, and consecutive groups a replica, so that the
    most frequent communication stays within a host.
    """

    mesh: DeviceMesh  # FSDP2's mesh: ("shard",), or ("replicate", "shard")
    replicas: int
    tensor: int = 1  # tensor-parallel processes, which compute the same rows
    tensor_group: Any = None  # None for a group of one
    replica_group: Any = None  # the processes that hold one whole model; None: all

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "ShardingMesh":
        """Builds the mesh over all processes for the layout `parallel` (numbers of replicas and of
        tensor-parallel processes); a collective.
        """
        replicas, tensor = parallel.replicas, parallel.tensor
        shards = dist.get_world_size() // replicas // tensor
        sizes = {SHARD: shards}
        if replicas > 1:
            sizes = {REPLICATE: replicas} | sizes
        data = tuple(sizes)
        if tensor > 1:
            sizes |= {TENSOR: tensor}
        kind = device.current().here().type
        mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if tensor == 1:
            replica_group = None if replicas == 1 else mesh.get_group(SHARD)
            return cls(mesh, replicas, replica_group=replica_group)
        replica_group = None
        if replicas > 1:
            replica_group, _ = dist.new_subgroups(shards * tensor)
        return cls(mesh[data], replicas, tensor, mesh.get_group(TENSOR), replica_group)

    @property
    def data(self) -> int:
        return dist.get_world_size() // self.tensor

    @property
    def data_rank(self) -> int:
        return dist.get_rank() // self.tensor

    @property
    def tensor_rank(self) -> int:
        return dist.get_rank() % self.tensor

    @property
    def speaks(self) -> bool:
        """Returns whether this process reports results: it is the first of the processes that
        compute the same rows.
        """
        return self.tensor_rank == 0

    @property
    def shards(self) -> int:
        """Returns the number of processes over which FSDP2 shards the rows of a parameter (or of
        its tensor-parallel share).
        """
        return self.data // self.replicas

    @property
    def shard_group(self) -> Any:
        """Returns the process group over which the rows of a parameter are sharded."""
        return self.mesh.get_group(SHARD)

    @property
    def shard_rank(self) -> int:
        return self.data_rank % self.shards

    @property
    def replica(self) -> int:
        """Returns the index of this process's replica."""
        return self.data_rank // self.shards

    def writes(self, split: object | None, *, whole: bool = False) -> bool:
        """Returns whether this process writes its rows to a checkpoint: of the processes with equal
        rows only the first does.
        `split`: the parameter's tensor-parallel split; None if the parameter is replicated.
        `whole`: every process holds all rows.
        """
        first = split is not None or self.tensor_rank == 0
        return first and self.replica == 0 and (not whole or self.shard_rank == 0)

    def first_row(self, rows: int) -> int:
        """Returns the index of the first row that this process holds of a parameter with `rows`
        rows, which are divided into equal blocks; the last ones may be short or empty.
        """
        block = -(-rows // self.shards)
        return min(self.shard_rank * block, rows)

    @property
    def layout(self) -> str:
        shared = f" x TP {self.tensor}" if self.tensor > 1 else ""
        if self.replicas == 1:
            return f"FSDP over {self.shards}{shared}"
        return f"{self.replicas} replicas, FSDP over {self.shards}{shared} each"

    def sum_of_speakers(self, x: Tensor) -> Tensor:
        """Sums x in place over the processes that report results (`speaks`); every process gets the
        total.
        """
        if not self.speaks:
            x.zero_()
        dist.all_reduce(x)
        return x
