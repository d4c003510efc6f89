"""Weight sync from the trainer's shards to a colocated engine on each process: a WeightSync. Each
engine receives only the slices that it reads.

At the start, the engine's own loader gets tensors that only record which elements it reads; from
this record and the shard layout, every process computes the same plan. A push then moves each
planned slice once, verifies it, and lets the loader copy from the received slices and the trainer's
own shard. If the engine has `destinations`, the push replays the loader's recorded copies instead
(`replay.py`), once a push by the loader itself has shown that the loader does nothing else.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.shards import Box, LogicalTensor, Shard, intersection, narrowed, within
from rftmega.core.types import Metrics, SliceChecksums
from rftmega.runtime.device.spans import span
from rftmega.runtime.parallel.checksum import checksums
from rftmega.runtime.parallel.watchdog import mark
from rftmega.weights.destinations import Destinations, Part, Recording, recorded
from rftmega.weights.lazy_tensors import Fetch, LazyTensor, reader
from rftmega.weights.message import (
    Layout,
    checksums_of,
    message_for,
    opened,
    refuse_damaged,
    sums_of,
    written,
)
from rftmega.weights.needs import Needs, everybodys, needs_of, planned_moves, refuse_unread
from rftmega.weights.plan import Transfer
from rftmega.weights.replay import Proof, ReceivedFill, message_order
from rftmega.weights.slice_sums import SliceSums
from rftmega.weights.slices import (
    LocalShards,
    TensorSlice,
    buckets_of,
    everybodys_tensors,
    planned,
)

log = logging.getLogger(__name__)


class Loader(Protocol):
    """Loader is the part of an engine's interface that a push uses."""

    @property
    def destinations(self) -> Destinations | None: ...

    def trace_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int
    ) -> None: ...

    def invalidate(self) -> None: ...


class PushBucket(NamedTuple):
    """PushBucket is a group of tensors that are loaded consecutively, with the layouts of the
    messages that this process sends and receives for them.
    """

    tensors: list[LogicalTensor]
    sends: dict[int, Layout]  # by target; targets with equal needs share one
    receives: dict[int, Layout]  # by source


class EngineWeights:
    """EngineWeights pushes new weights to the engines of all processes. All processes must
    construct it and call its methods in the same order.
    """

    def __init__(self, shards: Sequence[Shard], engine: Loader, *, bucket_bytes: int):
        """Runs the engine's loader once to record what it reads, and plans the push; a collective
        over all processes. The engine's weights are lost. `shards`: the trainer's shards of this
        process; `engine`: the engine in this process; `bucket_bytes`: most bytes of the tensors
        that are sent together.

        Raises EngineError for a tensor that no engine reads: policy and engine would not be the
        same model.
        """
        self.engine = engine
        self.shards = LocalShards(shards)
        tensors = everybodys_tensors(shards)
        recorder = (
            recorded(tensors, engine.trace_load, engine.destinations)
            if engine.destinations
            else None
        )
        self.needs = needs_of(recorder.asked if recorder else self._rehearse(tensors))
        kinds, kind_of = everybodys(self.needs)
        refuse_unread(tensors, kinds)
        self.buckets = _plan(buckets_of(tensors, bucket_bytes, for_an_engine=True), kinds, kind_of)
        self.recording = Recording(recorder, self.shards) if recorder else None
        missing = torch.tensor(sum(map(self._missing_bytes, tensors)), device=self.shards.device)
        dist.all_reduce(missing)
        self.least_bytes = int(missing)
        # peak size of the messages that this process held in the last push
        self.buffer_bytes = 0
        self._sums = SliceSums()  # checksums of the last push

    def checksums(self) -> list[SliceChecksums]:
        """Returns for every slice of the last push its checksums: of the trainer's weights now, as
        sent and as received; a collective. The policy's weights must be on the device.
        """
        return self._sums.compared(self.shards)

    def push(self, *, version: int) -> Metrics:
        """Sends the trainer's current weights to the engines of all processes, as weight version
        `version`. After a failure on any process, no engine generates until a push succeeds on all
        processes.

        Returns metrics of the push. Raises the error of this process's engine, or EngineError. A
        push that failed may be repeated if all processes are alive. Other errors in moving weights
        (e.g. no memory for a message) are raised unchanged, and this process can't continue.
        """
        begin = time.perf_counter()
        self.engine.invalidate()
        try:
            moved = self._push(version)
        except BaseException:
            self.engine.invalidate()  # it may have taken everything where another's did not
            raise
        return {
            "push_seconds": time.perf_counter() - begin,
            "push_bytes": float(moved),
            "push_bytes_least": float(self.least_bytes),
            "push_ratio": moved / self.least_bytes if self.least_bytes else 1.0,
            "push_buffer_bytes": float(self.buffer_bytes),
        }

    @torch.no_grad()
    def _push(self, version: int) -> int:
        """Runs a push. Returns the bytes that all processes together sent."""
        failure: Exception | None = None
        self.shards.look_again()
        try:
            self._sums = SliceSums()
            passage = _Passage(self, version, self._sums)
            try:
                self.engine.load_weights(passage.tensors(), version=version)
                passage.finish()
            except Exception as error:
                failure = error
            self.buffer_bytes = passage.buffer_bytes
            passage.drain()  # other processes wait for this one's messages
            total = torch.tensor(
                [int(failure is not None), passage.sent_bytes], device=self.shards.device
            )
            dist.all_reduce(total)
        except RuntimeError as raised:
            if not is_of_a_connection(raised):
                raise
            raise EngineFault(
                f"Push {version} broke off: a process is gone ({raised})."
            ) from failure
        failed, moved = total.tolist()
        if failure is not None:
            raise failure
        if failed:
            raise EngineFault(
                f"Push {version} failed on {failed} other process(es); no engine has weights now."
            )
        return int(moved)

    def _rehearse(self, tensors: Sequence[LogicalTensor]) -> dict[str, list[Box]]:
        """Runs the loader with tensors that record reads, for an engine without `destinations`.
        Returns the blocks (boxes) that the loader reads, by HF name.
        """
        asked: dict[str, list[Box]] = defaultdict(list)

        def recorder(name: str) -> Fetch:
            def fetch(box: Box, out: Tensor) -> None:
                asked[name].append(box)
                out.zero_()

            return fetch

        self.engine.trace_load(
            (name, LazyTensor.of(shape, dtype, recorder(name), self.shards.device))
            for name, dtype, shape in planned(tensors)
        )
        return asked

    def _missing_bytes(self, tensor: LogicalTensor) -> int:
        """Returns how many bytes of a tensor this process's engine reads and this process's shards
        do not hold.
        """
        elements = 0
        for number, name in enumerate(tensor.names):
            elements += self.shards.missing(tensor, number, self.needs.get(name, []))
        return elements * tensor.dtype.itemsize


class _Passage:
    """State of one push on one process: the buckets still to exchange and the
    copies in progress.
    """

    def __init__(self, weights: EngineWeights, version: int, sums: SliceSums):
        self.weights = weights
        self.version = version
        self.sums = sums
        self.sent_bytes = 0
        self.over = False  # the loader has read the last tensor
        self.buffer_bytes = 0  # peak size of the messages held at once
        self.proof: Proof | None = None  # of an unproven recording
        self._fillings: list[ReceivedFill] = []
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self._left = iter(enumerate(weights.buckets))
        self._travelling = self._post()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, lazy tensor) for each tensor that goes through the engine's loader;
        tensors whose recorded copies are replayed are left out. Raises EngineError if a message
        differs from the one that was sent.
        """
        recording, destinations = self.weights.recording, self.weights.engine.destinations
        if recording and destinations and not recording.proven:
            self.proof = Proof()
            destinations.watch(recording.parameters, self.proof.filled)
        while self._travelling is not None:
            yield from self._opened(*self._arrive())
        self.over = True

    def finish(self) -> None:
        """Checks, after the engine has returned from its load, that the push is complete.

        Raises EngineError if the engine did not read all tensors or left a parameter unfilled.
        """
        if not self.over:
            raise EngineError("The engine stopped reading before the last tensor of the push.")
        for filling in self._fillings:
            if not filling.done:
                raise EngineError(
                    f"The engine left {filling.fill.parameter} without its weights of push {self.version}."
                )
        if self.proof and self.weights.recording:
            self.weights.recording.prove(self.proof)

    def _opened(
        self, number: int, bucket: PushBucket, came: dict[int, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Verifies the messages of bucket `number` (`came`, by source process), and yields the
        bucket's tensors for the loader.

        The messages are freed when this generator ends, before the transfer of the bucket after the
        next starts.
        """
        for source, message in came.items():
            refuse_damaged(message, bucket.receives[source], self.version, source)
        if by_loader := self._copy(number, bucket, came):
            yield from self._on_demand(bucket, came, by_loader)
        # after the loader has read the message: nothing may have changed it meanwhile
        for source, message in came.items():
            self.sums.received(
                source,
                bucket.receives[source].slices,
                checksums_of(message, bucket.receives[source]),
            )

    def _copy(self, number: int, bucket: PushBucket, came: dict[int, Tensor]) -> list[Part]:
        """Replays the recorded copies of a bucket or, while the recording is unproven, registers
        the copies for a comparison. Returns the HF tensors that must go through the loader.
        """
        recording, destinations = self.weights.recording, self.weights.engine.destinations
        if recording is None or destinations is None:
            return _everything(bucket)
        fills, by_loader = recording.of_bucket(number, bucket.tensors, bucket.receives)
        fillings = [ReceivedFill(fill, came, self.weights.shards, self.sums) for fill in fills]
        if self.proof:
            self.proof.expect(fillings)
            return _everything(bucket)
        self._fillings += fillings
        for filling in fillings:
            destinations.fill(filling.fill.parameter, filling)
        return by_loader

    def _on_demand(
        self, bucket: PushBucket, came: dict[int, Tensor], wanted: Sequence[Part]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, lazy tensor) for the HF tensors `wanted` of a bucket, with elements from
        the messages `came` and this process's own shard.
        """
        arrived: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
        for source, message in came.items():
            for part, elements in opened(message, bucket.receives[source]):
                arrived[part.name].append((part.box, elements))
        for tensor, number in wanted:
            name, dtype, shape = planned([tensor])[number]
            own = self.weights.shards.pieces(tensor, number)
            self._record(tensor, number, own)
            fetch = reader(name, own + arrived[name])
            yield name, LazyTensor.of(shape, dtype, fetch, self.weights.shards.device)

    def _record(
        self, tensor: LogicalTensor, number: int, own: Sequence[tuple[Box, Tensor]]
    ) -> None:
        """Records checksums of the elements that the engine reads from `own`, the blocks that this
        process's shards hold.
        """
        for box, elements in own:
            for needed in self.weights.needs.get(tensor.names[number], []):
                if (common := intersection(box, needed)) is not None:
                    read = narrowed(elements, within(common, box))
                    used = TensorSlice(tensor, number, common)
                    self.sums.used([used], checksums(read[None]))

    def drain(self) -> None:
        """Exchanges the remaining buckets without loading them, so that other processes do not
        hang.
        """
        while self._travelling is not None:
            self._arrive()

    def _post(self) -> tuple[int, PushBucket, dict[int, Tensor], list[Any], list[Tensor]] | None:
        """Starts sending and receiving the next bucket. Returns its number, the bucket, the
        received messages by source, the operations in progress and the sent messages; None after
        the last bucket.
        """
        number, bucket = next(self._left, (-1, None))
        if bucket is None:
            return None
        device = self.weights.shards.device
        alike: dict[int, Tensor] = {}  # processes with equal needs get the same message
        sent = {}
        for target, layout in bucket.sends.items():
            if id(layout) not in alike:
                slices = self.weights.shards.slices_of(layout.slices)
                alike[id(layout)] = written(
                    message_for(layout, device), layout, self.version, slices
                )
            sent[target] = alike[id(layout)]
            self.sums.sent(target, layout.slices, sums_of(sent[target], layout))
        came = {source: message_for(layout, device) for source, layout in bucket.receives.items()}
        self.sent_bytes += sum(layout.payload for layout in bucket.sends.values())
        self._count([*alike.values(), *came.values()])
        operations = [dist.P2POp(dist.isend, message, target) for target, message in sent.items()]
        operations += [dist.P2POp(dist.irecv, message, source) for source, message in came.items()]
        return (
            number,
            bucket,
            came,
            dist.batch_isend_irecv(operations) if operations else [],
            list(sent.values()),
        )

    def _count(self, messages: Sequence[Tensor]) -> None:
        """Adds new messages to the messages still in use, and updates the peak size in bytes."""
        self._alive = [(storage, size) for storage, size in self._alive if not storage.expired()]
        self._alive += [
            (StorageWeakRef(message.untyped_storage()), message.nbytes) for message in messages
        ]
        self.buffer_bytes = max(self.buffer_bytes, sum(size for _, size in self._alive))

    def _arrive(self) -> tuple[int, PushBucket, dict[int, Tensor]]:
        """Starts the next bucket's transfers, which run while this bucket is loaded, then waits for
        this bucket's. Returns the bucket's number, the bucket and the received messages by source.
        """
        mark()
        assert self._travelling is not None
        number, bucket, came, works, _ = self._travelling
        self._travelling = self._post()
        with span("receive weights"):
            for work in works:
                work.wait()
        return number, bucket, came


def is_of_a_connection(error: RuntimeError) -> bool:
    """Returns whether the error is a failed connection. NCCL and store errors have their own
    classes; gloo's messages name a gloo source file.
    """
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _plan(
    buckets: Sequence[list[LogicalTensor]], kinds: Sequence[Needs], kind_of: Sequence[int]
) -> list[PushBucket]:
    """Plans the push identically on every process. Returns this process's sends and receives for
    each bucket. `kinds`: the distinct needs of engine ranks; `kind_of`: for each rank, the index of
    its needs in `kinds`.
    """
    made = []
    for tensors, moves in zip(buckets, planned_moves(buckets, kinds, kind_of), strict=True):
        made.append(_own_part(tensors, moves))
    return made


def _own_part(tensors: list[LogicalTensor], moves: Iterable[Transfer]) -> PushBucket:
    """Returns the sends and receives of this process for one bucket. `moves`: the transfers of all
    processes.
    """
    me = dist.get_rank()
    sends: dict[int, list[TensorSlice]] = defaultdict(list)
    receives: dict[int, list[TensorSlice]] = defaultdict(list)
    for source, target, part in moves:
        if source == me:
            sends[target].append(part)
        if target == me:
            receives[source].append(part)
    alike: dict[Any, Layout] = {}
    for theirs in sends.values():
        alike.setdefault(tuple(theirs), Layout(message_order(theirs)))
    return PushBucket(
        tensors,
        {target: alike[tuple(theirs)] for target, theirs in sends.items()},
        {source: Layout(message_order(theirs)) for source, theirs in receives.items()},
    )


def _everything(bucket: PushBucket) -> list[Part]:
    return [(tensor, number) for tensor in bucket.tensors for number in range(len(tensor.names))]
