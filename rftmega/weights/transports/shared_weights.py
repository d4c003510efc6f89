"""Weight sync to servers on this host: every process writes its slices into shared memory that all
processes and servers map.

No tensor is gathered: each byte is written once, from the shard directly to the memory from which
the engines' loaders copy, for any number of engines.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.shards import LogicalTensor, Shard, narrowed, whole
from rftmega.core.types import Metrics, SliceChecksums
from rftmega.runtime.parallel import shared
from rftmega.runtime.parallel.checksum import blocks, checksums
from rftmega.runtime.parallel.watchdog import mark
from rftmega.weights.plan import Balance
from rftmega.weights.slices import (
    LocalShards,
    TensorSlice,
    buckets_of,
    everybodys_tensors,
    planned,
)

SEGMENTS = 2  # one is read while the other is being written


class Receivers(Protocol):
    """Receivers is the part of the local engines' interface that a push uses: `begin`, then `take`
    for each bucket, then `finish`.

    Its methods are called only on the first process.
    """

    version: int | None

    def expect(self, names: Sequence[str]) -> None: ...

    def begin(self) -> None: ...

    def lacks_weights(self) -> bool:
        """Returns whether any engine needs the weights that `take` loads. If the weights are
        frozen, engines that have loaded them already need none.
        """
        ...

    def take(self, bucket: dict[str, Any]) -> None: ...

    def finish(self, version: int) -> None: ...

    def invalidate(self) -> None: ...

    def measures(self) -> Metrics:
        """Returns metrics of the engines, e.g. the number of healthy servers."""
        ...


class SegmentEntry(NamedTuple):
    """SegmentEntry says where a tensor lies in a shared memory segment: its first byte `start`,
    dtype and shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


class SharedBucket(NamedTuple):
    places: list[SegmentEntry]
    targets: list[SegmentEntry]  # entries of the tensors that this process writes to
    writes: list[TensorSlice]  # the slice of each
    # (first, number) of consecutive places of equal size
    alike: list[tuple[int, int]]


class SharedWeights:
    """SharedWeights pushes new weights to the engines of this host.

    All processes must construct it and call its methods in the same order.
    """

    def __init__(self, shards: Sequence[Shard], engines: Receivers, *, bucket_bytes: int):
        self.engines = engines
        self.shards = LocalShards(shards)
        tensors = everybodys_tensors(shards)
        self.buckets = _plan(buckets_of(tensors, bucket_bytes, for_an_engine=True))
        self.total_bytes = sum(tensor.bytes for tensor in tensors)
        self.name, self.size, self.memory = _shared_memory(segment_bytes(tensors, bucket_bytes))
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._sent: dict[str, int] = {}  # tensor -> its checksum in the last push
        self._failure: Exception | None = None
        self._control = ThreadPoolExecutor(1) if dist.get_rank() == 0 else None
        self._ask(
            engines.expect, [place.name for bucket in self.buckets for place in bucket.places]
        )
        self._agree("Telling the engines what a push brings")

    def push(self, *, version: int) -> Metrics:
        """Sends the trainer's current weights to the engines of this host, as weight version
        `version`, and returns metrics of the push. After a failure, no engine generates until a
        push succeeds.

        Raises EngineError on every process if the push fails.
        """
        begin = time.perf_counter()
        self.engines.invalidate()
        self.shards.look_again()
        self._failure = None
        self._ask(self.engines.begin)
        least = self.total_bytes if self._are_wanted() else 0
        reading: list[Future[None]] = []
        try:
            moved = self._send(version, reading) if least else 0
        finally:  # reading must not extend into the next push
            wait(reading)
        self._ask(self.engines.finish, version)
        self._agree(f"Push {version}")
        self.engines.version = version
        told: list[Metrics] = [self.engines.measures()]
        dist.broadcast_object_list(told)
        return told[0] | {
            "push_seconds": time.perf_counter() - begin,
            "push_bytes": float(moved),
            "push_bytes_least": float(least),
            "push_ratio": moved / least if least else 1.0,
            "push_buffer_bytes": float(len(self.memory)),
        }

    def _are_wanted(self) -> bool:
        """Returns, on every process, whether an engine lacks the weights."""
        told = [self._control is not None and self.engines.lacks_weights()]
        dist.broadcast_object_list(told)
        return told[0]

    def checksums(self) -> list[SliceChecksums]:
        """Returns the checksums of every tensor of the last push; a collective. The policy's
        weights must be on the device.

        The trainer's weights are written again, into memory that no engine reads at that time. A
        worker accepts a tensor only if its checksum is the one sent with the tensor, so the
        received and sent checksums are equal.
        """
        found = []
        self.shards.look_again()
        for bucket in self.buckets:
            held = self._write(bucket, self.memory[: self.size])
            for place, now in zip(bucket.places, held[:-1], strict=True):
                sent = self._sent.get(place.name)
                found.append(
                    SliceChecksums(place.name, whole(place.shape), -1, -1, now, sent, sent)
                )
        return found

    def _send(self, version: int, reading: list["Future[None]"]) -> int:
        """Sends all buckets, one after the other. On the first process, a future for the engines'
        read of each bucket is appended to `reading`.

        Returns the number of bytes that all processes wrote.
        """
        moved = 0
        for number, bucket in enumerate(self.buckets):
            self._settle(reading, number - SEGMENTS)
            self._agree(f"Push {version}")
            memory = self.memory[number % SEGMENTS * self.size :][: self.size]
            *sums, written = self._write(bucket, memory)
            self._sent |= {
                place.name: total for place, total in zip(bucket.places, sums, strict=True)
            }
            moved += written
            if self._control:
                told = self._described(bucket, number % SEGMENTS, sums)
                told |= {"version": version, "last": number == len(self.buckets) - 1}
                reading.append(self._control.submit(self.engines.take, told))
        for number in range(len(reading)):
            self._settle(reading, number)
        if moved != self.total_bytes:
            raise EngineError(
                f"{moved} of {self.total_bytes} bytes were written in push {version}; no engine has weights now."
            )
        return moved

    def _ask(self, work: Callable[..., None], *arguments: Any) -> None:
        """Calls `work`, a method of the engines, on the first process; skips the call if an earlier
        one has failed.
        """
        if self._control and self._failure is None:
            try:
                work(*arguments)
            except EngineError as error:
                self._failure = error

    def _settle(self, reading: Sequence["Future[None]"], number: int) -> None:
        """Waits until the engines have read bucket `number`, so that its memory segment can be
        overwritten. `reading`: for each bucket so far, the future of the engines' read.
        """
        if 0 <= number < len(reading):
            self._ask(reading[number].result)

    def _agree(self, what: str) -> None:
        """Synchronises all processes; every process raises if the engines failed on the first.
        `what`: the action that failed, for the error text.
        """
        mark()
        failed = torch.tensor(int(self._failure is not None), device=self.shards.device)
        dist.all_reduce(failed)
        if self._failure is not None:
            raise self._failure
        if failed:
            raise EngineFault(f"{what} failed (see the first process); no engine has weights now.")

    @torch.no_grad()
    def _write(self, bucket: SharedBucket, memory: Tensor) -> list[int]:
        """Writes this process's slices of a bucket to `memory`; a collective. Returns the checksums
        of all tensors of the bucket, followed by the number of bytes that all processes wrote.
        """
        targets = self._targets(bucket, memory)
        if targets:
            torch._foreach_copy_(targets, self.shards.slices_of(bucket.writes))
        dist.barrier()
        sums = torch.zeros(len(bucket.places) + 1, dtype=torch.int64)
        sums[-1] = sum(target.nbytes for target in targets)
        for first, number in bucket.alike:  # processes share the checksum computation
            begin, end = (
                first + number * rank // dist.get_world_size()
                for rank in (dist.get_rank(), dist.get_rank() + 1)
            )
            if begin < end:
                place = bucket.places[begin]
                size = blocks(place.bytes)
                stored = memory[place.start : place.start + (end - begin) * size].view(
                    end - begin, size
                )
                stored[:, place.bytes :].zero_()  # the checksum covers it
                sums[begin:end] = checksums(stored)
        sums = sums.to(self.shards.device)
        dist.all_reduce(sums)
        found: list[int] = sums.tolist()
        return found

    def _targets(self, bucket: SharedBucket, memory: Tensor) -> list[Tensor]:
        """Returns the views of the segment `memory` that this process writes a bucket's slices to.
        The views are cached, since they are the same in every push.
        """
        key = id(bucket.writes), int(memory.storage_offset())
        if key not in self._views:
            self._views[key] = [
                narrowed(place.view(memory), written.box)
                for place, written in zip(bucket.targets, bucket.writes, strict=True)
            ]
        return self._views[key]

    def _described(self, bucket: SharedBucket, segment: int, sums: Sequence[int]) -> dict[str, Any]:
        """Returns the description of a bucket for the worker that reads it
        (`receivers.shared_memory.SharedMemoryUpdate`). `segment`: number of the memory segment;
        `sums`: the tensors' checksums.
        """
        return {
            "memory": self.name,
            "size": self.size * SEGMENTS,
            "tensors": [
                [
                    place.name,
                    str(place.dtype).removeprefix("torch."),
                    list(place.shape),
                    place.start + segment * self.size,
                    written,
                ]
                for place, written in zip(bucket.places, sums, strict=True)
            ],
        }


def _plan(buckets: Sequence[list[LogicalTensor]]) -> list[SharedBucket]:
    """Plans the slices that this process writes. Together, the processes write every element once;
    the processes that hold a slice share the work evenly.
    """
    me, reader = dist.get_rank(), -1
    balance = Balance()
    made = []
    for tensors in buckets:
        bucket = SharedBucket([], [], [], [])
        start = 0
        for tensor in tensors:
            first = len(bucket.places)
            for name, dtype, shape in planned([tensor]):
                bucket.places.append(SegmentEntry(name, dtype, shape, start))
                start += blocks(torch.Size(shape).numel() * dtype.itemsize)
            everything = tuple((number, whole(shape)) for number, shape in enumerate(tensor.shapes))
            for source, _, part in balance.transfers(tensor, ((reader, everything),)):
                if source == me:
                    bucket.targets.append(bucket.places[first + part.number])
                    bucket.writes.append(part)
        for _, run in groupby(
            range(len(bucket.places)), key=lambda number: bucket.places[number].bytes
        ):
            numbers = list(run)
            bucket.alike.append((numbers[0], len(numbers)))
        made.append(bucket)
    return made


def segment_bytes(tensors: Sequence[LogicalTensor], bucket_bytes: int) -> int:
    """Returns how many bytes of memory the largest bucket takes if `tensors` are grouped into
    buckets of `bucket_bytes`.
    """
    most = 0
    for bucket in buckets_of(tensors, bucket_bytes, for_an_engine=True):
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in planned(bucket)]
        most = max(most, sum(map(blocks, sizes)))
    return most


def _shared_memory(size: int) -> tuple[str, int, Tensor]:
    """Creates SEGMENTS memory segments of `size` bytes that every process of this host maps; a
    collective. Returns (name, bytes per segment, the bytes of all segments as a tensor).
    """
    told = [shared.create(size * SEGMENTS) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told)
    return (
        told[0],
        size,
        torch.frombuffer(shared.attach(told[0], size * SEGMENTS), dtype=torch.uint8),
    )
