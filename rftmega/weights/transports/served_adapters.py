"""ServedAdapters brings adapters to engines in processes of their own: the frozen model goes to each
once, by whatever transport there is, and the pairs of matrices with each push, unrounded.
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
    """The engines, which land with the payload that is there.

    Only the first process's are asked to do anything.
    """

    payload: bytes

    def invalidate(self) -> None: ...


class ServedAdapters:
    """ServedAdapters is a WeightSync of adapters. Every process constructs it, and calls it, alike.

    A push is that of the frozen model: engines that have it are only told to land. Each lands with
    the adapters, also one that comes between two pushes.
    """

    def __init__(
        self,
        base: RemoteWeights | SharedWeights,
        adapters: AdapterSource,
        engines: AdapterReceivers,
        *,
        bucket_bytes: int,
    ):
        """`base`: what brings the frozen model."""
        self.base, self.engines = base, engines
        self._pairs = AdapterPairs(adapters, bucket_bytes=bucket_bytes)

    def checksums(self) -> list[SliceChecksums]:
        """Returns those of the frozen model, and one of each matrix of an adapter; a collective.

        A server takes a matrix only if it finds the checksum that it was sent with, so what was
        received is what was sent.
        """
        return [*self.base.checksums(), *self._pairs.checksums()]

    def push(self, *, version: int) -> Metrics:
        """Afterwards every engine that could be given them answers under `version`, with the
        adapters of now.

        Raises as the frozen model's push, and EngineError where processes have different adapters.
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
        """Does what LateWeights does: engines that have come get model and adapters."""
        return self.base.push_to_late() if isinstance(self.base, RemoteWeights) else 0
