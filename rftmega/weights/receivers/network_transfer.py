"""Receives a push over the network inside a vLLM server's worker: the slices that this worker
reads, sent by the trainer's processes.

At the start, the worker's loader gets tensors that only record which elements it reads. From this
record, the trainer plans which process sends which slice, and sends the plan to the worker.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rftmega.core.shards import Box
from rftmega.weights.lazy_tensors import Fetch, LazyTensor, reader
from rftmega.weights.message import message_for, opened, refuse_damaged
from rftmega.weights.needs import needs_of
from rftmega.weights.receivers.checkpoint_transfer import CheckpointTransferEngine
from rftmega.weights.transports.transfer_group import InFlight, TransferGroup, visited, wait_all
from rftmega.weights.transports.transfer_plan import (
    ReceivedBucket,
    ToldBucket,
    packed_needs,
    unpacked_plan,
)


@dataclass
class NetworkInit(WeightTransferInitInfo):
    """NetworkInit holds the address of the trainer's rendezvous store and the tensors of a push.

    `meeting`: host and port of the store. `name`: name of the process group. `trainers`: number of
    trainer processes. `host`: the address at which the trainer processes reach this server.
    `tensors`: name, dtype and shape of each tensor. `seconds`: time limit of one message.
    """

    meeting: list[Any]  # host and port of the store
    name: str  # of the process group
    trainers: int
    host: str
    tensors: list[Any]
    seconds: float


@dataclass
class NetworkUpdate(WeightTransferUpdateInfo):
    """NetworkUpdate announces the push of weight version `version`, whose messages then arrive
    bucket by bucket.
    """

    version: int


class NetworkWeightTransferEngine(CheckpointTransferEngine[NetworkInit, NetworkUpdate]):
    """NetworkWeightTransferEngine receives slices over a process group of the trainer's processes
    and this server's workers.
    """

    init_info_cls = NetworkInit
    update_info_cls = NetworkUpdate
    _group: TransferGroup | None = None

    def init_transfer_engine(self, init_info: NetworkInit) -> None:
        self.shutdown()
        host, port = init_info.meeting
        store = visited(host, port, seconds=init_info.seconds)
        worker = self.parallel_config.rank
        self._group = TransferGroup(
            store,
            init_info.name,
            rank=init_info.trainers + worker,
            size=init_info.trainers + self.parallel_config.world_size,
            device=self.device,
            host=init_info.host,
            seconds=init_info.seconds,
        )
        told = ToldBucket(
            [(name, dtype, tuple(shape)) for name, dtype, shape in init_info.tensors], {}
        )
        everything = ReceivedBucket(told)
        self.expect(name for name, _, _ in everything.tensors)
        needs: Any = packed_needs(self._needs(everything))
        store.set(f"{init_info.name}/needs/{worker}", needs)
        self._buckets = unpacked_plan(store.get(f"{init_info.name}/plan/{worker}"))

    def receive_weights(self, update_info: NetworkUpdate) -> None:
        """Receives and loads all buckets of a push; each bucket is received while the bucket before
        is loaded.

        A worker that fails leaves the process group, so that the trainer does not wait for it.
        """
        try:
            self._receive(update_info.version)
        except Exception:
            self.shutdown()
            raise

    def _receive(self, version: int) -> None:
        coming = self._posted(0)
        for number, bucket in enumerate(self._buckets):
            messages, in_flight = coming
            coming = self._posted(number + 1)
            wait_all(in_flight)
            for source, message in messages.items():
                refuse_damaged(message, bucket.layouts[source], version, source)
            self.load(self._on_demand(bucket, messages))
        self.refuse_gaps()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _posted(self, number: int) -> tuple[dict[int, Tensor], list[InFlight]]:
        """Starts receiving bucket `number`. Returns its messages by source, and the transfers in
        progress; both are empty after the last bucket.
        """
        layouts = self._buckets[number].layouts if number < len(self._buckets) else {}
        messages = {source: message_for(layout, self.device) for source, layout in layouts.items()}
        assert self._group is not None
        return messages, [self._group.receive(each, source) for source, each in messages.items()]

    def _on_demand(
        self, bucket: ReceivedBucket, messages: dict[int, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, lazy tensor) for each tensor of the bucket; the elements come from the
        received slices.
        """
        arrived: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
        for source, message in messages.items():
            for part, elements in opened(message, bucket.layouts[source]):
                arrived[part.name].append((part.box, elements))
        for name, dtype, shape in bucket.tensors:
            fetch = reader(name, arrived[name])
            yield name, LazyTensor.of(shape, dtype, fetch, self.device)

    def _needs(self, everything: ReceivedBucket) -> dict[str, list[Box]]:
        """Runs a load to record which blocks (boxes) of each tensor this worker's loader reads.
        `everything`: all tensors of a push, as one bucket. Returns the blocks by HF name; the
        worker's weights are lost.
        """
        asked: dict[str, list[Box]] = defaultdict(list)

        def recording(name: str) -> Fetch:
            def fetch(box: Box, out: Tensor) -> None:
                asked[name].append(box)
                out.zero_()

            return fetch

        self.start_weight_update()
        self.load(
            (name, LazyTensor.of(shape, dtype, recording(name), self.device))
            for name, dtype, shape in everything.tensors
        )
        self.finish_weight_update()
        return needs_of(asked)
