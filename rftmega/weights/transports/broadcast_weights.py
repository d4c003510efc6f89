"""Weight sync to engines that join a torch process group by address: the trainer's first process
broadcasts every tensor whole, as SGLang expects.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rftmega.core.errors import EngineFault
from rftmega.core.shards import Shard
from rftmega.models.hf.hf_folder import PlannedTensor
from rftmega.runtime.parallel.watchdog import mark
from rftmega.weights.slices import planned
from rftmega.weights.transports.remote_weights import Asked, RemoteReceivers, WaitingEngine, begun
from rftmega.weights.transports.transfer_group import Meeting
from rftmega.weights.transports.whole_weights import WholeWeights

WORKS = "The engines' group"


class BroadcastWeights(WholeWeights):
    """BroadcastWeights pushes weights over one process group per engine, so that an engine that
    dies breaks only its own group.

    The trainer's first process sends the whole model to each engine. Every process holds one bucket
    at a time, which is sent to the engines one after the other.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        engines: RemoteReceivers,
        *,
        bucket_bytes: int,
        host: str,
        seconds: float,
    ):
        """`shards`: the trainer's shards of this process; `engines`: the remote engines;
        `bucket_bytes`: most bytes gathered at a time; `host`: address at which engines reach the
        first process; `seconds`: time limit of one tensor.
        """
        super().__init__(shards, engines, bucket_bytes=bucket_bytes)
        self._host, self._limit = host, timedelta(seconds=seconds)
        self.reply_seconds = 2 * seconds
        self._groups: dict[str, EngineGroup] = {}  # on the first process
        self._joins = 0

    def close(self) -> None:
        self._forget(set(self._groups))

    def _linked(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        """Creates a process group with each waiting engine that has none. Returns the names of the
        engines that can take a push.
        """
        return self._first(lambda: self._met(waiting))

    def _keep(self, names: set[str]) -> None:
        self._forget(self._groups.keys() - names)

    def _met(self, waiting: Sequence[WaitingEngine]) -> list[str]:
        joining: Asked = {}
        made: dict[str, EngineGroup] = {}
        for each in waiting:
            if each.name in self._groups:
                continue
            self._joins += 1
            group = EngineGroup(
                self._host, f"push-{self._joins}-{each.name}", each.workers, self._limit
            )
            joining[each.name] = begun(self.engines.join, each.name, group.told(self.shards.device))
            made[each.name] = group
        # the reply of an engine that does not join has the reason
        for group in made.values():
            mark()
            with suppress(EngineFault):
                group.open(self.shards.device)
        for name in self._those(joining):
            if made[name].is_open:
                self._groups[name] = made[name]
            else:
                self.engines.miss(name, EngineFault(f"{WORKS} {made[name].name} did not meet."))
        return [each.name for each in waiting if each.name in self._groups]

    def _gave(self, names: Sequence[str], version: int) -> tuple[int, Asked]:
        buckets = self._exporter.buckets
        told = {"version": version, "messages": [_described(planned(each)) for each in buckets]}
        self.buffer_bytes = 0
        asked = self._asked(names, self.engines.receive, told)
        for bucket in buckets:
            tensors = [tensor.contiguous() for _, tensor in self._exporter.gathered(bucket)]
            held = sum(tensor.nbytes for tensor in tensors)
            self.buffer_bytes = max(self.buffer_bytes, held)
            for name in asked:
                mark()
                self._send(name, tensors, asked[name])
        return self._exporter.total_bytes * len(names), asked

    def _send(self, name: str, tensors: Sequence[Tensor], completion: "Future[None]") -> None:
        """Sends the tensors of a bucket to engine `name`; does nothing if the engine's process
        group is closed. Closes the group if the connection breaks, or if `completion`, the engine's
        pending reply, already holds an error.
        """
        group = self._groups.get(name)
        if group is None:
            return
        try:
            if completion.done() and completion.exception() is not None:
                raise EngineFault(f"{WORKS} {group.name} has nobody who takes weights.")
            group.broadcast(tensors)
        except EngineFault:  # its reply has the reason
            self._forget({name})

    def _least_bytes(self, landed: Sequence[str]) -> int:
        return self._exporter.total_bytes * len(landed)

    def _forget(self, names: set[str]) -> None:
        for name in names & self._groups.keys():
            self._groups.pop(name).close()


class EngineGroup:
    """EngineGroup is a process group of the trainer's first process, as rank 0, and the workers of
    one engine. The processes rendezvous as in torch's `init_process_group`.
    """

    def __init__(self, host: str, name: str, workers: int, limit: timedelta):
        """Opens the rendezvous store on `host`. `name`: name of the group; `workers`: number of the
        engine's workers; `limit`: time limit of joining and of each tensor.
        """
        self.name, self.size, self._limit = name, 1 + workers, limit
        self._meeting = Meeting(host, seconds=limit.total_seconds())
        self._group: Any = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def told(self, device: torch.device) -> dict[str, Any]:
        """Returns the request to an engine to join the group, with SGLang's field names. `device`:
        the trainer's device, which determines the backend (NCCL or Gloo).
        """
        return {
            "master_address": self._meeting.host,
            "master_port": self._meeting.port,
            "rank_offset": 1,
            "world_size": self.size,
            "group_name": self.name,
            "backend": _backend(device),
        }

    def open(self, device: torch.device) -> None:
        """Creates the group once all workers have joined. Raises EngineFault if a worker does not
        join in time.
        """
        store = dist.PrefixStore(self.name, self._meeting.store)
        try:
            # torch has no public API for a group outside the default one
            self._group, _ = c10d._new_process_group_helper(
                self.size,
                0,
                [],
                dist.Backend(_backend(device)),
                store,
                group_name=c10d.GroupName(self.name),
                timeout=self._limit,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise EngineFault(f"{WORKS} {self.name} did not come together: {error}") from error
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self.size)}

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors to all workers, in the given order. Raises EngineFault if a worker is gone
        or the time limit has passed.
        """
        try:
            sent = [
                dist.broadcast(tensor, src=0, group=self._group, async_op=True)
                for tensor in tensors
            ]
            for work in sent:
                work.wait(self._limit)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise EngineFault(f"{WORKS} {self.name} broke off: {error}") from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(dist.DistError, RuntimeError, ValueError):
                dist.destroy_process_group(group)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _described(tensors: Sequence[PlannedTensor]) -> dict[str, list[Any]]:
    """Returns lists of the names, dtypes and shapes of tensors for a JSON request."""
    return {
        "names": [each.name for each in tensors],
        "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors],
        "shapes": [list(each.shape) for each in tensors],
    }
