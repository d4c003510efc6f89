"""Pushes LoRA adapters to servers: the frozen base model is sent to each server once, by any
transport, and the unrounded adapter matrices with each push.
"""

import time
from typing import Protocol

import torch.distributed as dist

from rftmega.core.errors import EngineError
from rftmega.core.shards import AdapterSource
from rftmega.core.types import Metrics, SliceChecksums
from rftmega.weights import AdapterPairs
from rftmega.weights.transports.adapter_message import packed
from rftmega.weights.transports.remote_weights import RemoteWeights
from rftmega.weights.transports.shared_weights import SharedWeights


class AdapterReceivers(Protocol):
    """AdapterReceivers is the interface of the engines for adapters. `payload`: the serialised
    adapters of the last push, which an engine loads when it completes a push.

    Its methods are called only on the first process.
    """

    payload: bytes

    def invalidate(self) -> None: ...


class ServedAdapters:
    """ServedAdapters is a WeightSync for adapters on servers. All processes must construct it and
    call its methods in the same order.

    A push runs the base model's push, in which engines that have the base model receive no weights.
    Each engine loads the adapters when it completes a push, also an engine that joins between two
    pushes.
    """

    def __init__(
        self,
        base: RemoteWeights | SharedWeights,
        adapters: AdapterSource,
        engines: AdapterReceivers,
        *,
        bucket_bytes: int,
    ):
        """`base`: the WeightSync of the frozen base model; `adapters`: this process's shards of the
        LoRA matrices; `engines`: the servers; `bucket_bytes`: most bytes that are gathered at a
        time.
        """
        self.base, self.engines = base, engines
        self._pairs = AdapterPairs(adapters, bucket_bytes=bucket_bytes)

    def checksums(self) -> list[SliceChecksums]:
        """Returns the checksums of the frozen base model's slices and one SliceChecksums per
        adapter matrix; a collective.

        A server accepts a matrix only if its checksum is the one sent with the matrix, so the
        received and sent checksums are equal.
        """
        return [*self.base.checksums(), *self._pairs.checksums()]

    def push(self, *, version: int) -> Metrics:
        """Loads the current adapters into every engine that takes the push, as weight version
        `version`, and returns metrics of the push.

        Raises the errors of the base model's push, and EngineError if processes have different
        adapters.
        """
        begin = time.perf_counter()
        self.engines.invalidate()
        pairs, sums = self._pairs.for_push()
        if not all(self._pairs.everybodys(True, *sums)):
            raise EngineError(
                f"Processes have different adapters in push {version}; no engine has any now."
            )
        if dist.get_rank() == 0:
            told = dict(zip(pairs, sums, strict=True))
            self.engines.payload = packed(version, pairs, self._pairs.said, told)
        metrics = self.base.push(version=version)
        size = float(sum(tensor.nbytes for tensor in pairs.values()))
        sent = size * metrics["servers_healthy"]
        moved, least = metrics["push_bytes"] + sent, metrics["push_bytes_least"] + sent
        return metrics | {
            "push_seconds": time.perf_counter() - begin,
            "push_bytes": moved,
            "push_bytes_least": least,
            "push_ratio": moved / least,
            "push_buffer_bytes": metrics["push_buffer_bytes"] + size,
            "push_adapter_bytes": size,
        }

    def push_to_late(self) -> int:
        """Sends the base model and adapters to engines that have joined since the last push (see
        LateWeights). Returns the number of engines that received both.
        """
        return self.base.push_to_late() if isinstance(self.base, RemoteWeights) else 0
