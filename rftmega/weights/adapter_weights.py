"""Brings adapters into engines as adapters: the frozen model goes there once, and the pairs of
matrices with each push, unrounded.

A merged weight in bfloat16 loses small products (docs/adapters.md); an engine that adds the pair's
product to its own output does not.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.errors import EngineError
from rftmega.hf_folders.peft_folder import PREFIX, described, names_of_pairs, target_of
from rftmega.parallel.checksum import checksums
from rftmega.shards import AdapterSource
from rftmega.types import Metrics, SliceChecksums
from rftmega.weights.gather import Exporter
from rftmega.weights.push import EngineWeights


class AdapterEngine(Protocol):
    """AdapterEngine is an engine of this process that serves one adapter."""

    @property
    def has_weights(self) -> bool:
        """Says whether the model's own weights are there since the last sleep."""
        ...

    def invalidate(self) -> None: ...

    def load_adapter(self, pairs: dict[str, Tensor], said: dict[str, Any], *, version: int) -> None:
        """Replaces the adapter. `pairs` have PEFT's names, and `said` is PEFT's config."""
        ...


class AdapterWeights:
    """AdapterWeights is a WeightSync of adapters. Every process constructs it, and calls it, alike."""

    def __init__(
        self,
        base: EngineWeights,
        adapters: AdapterSource,
        engine: AdapterEngine,
        *,
        bucket_bytes: int,
    ):
        """`base`: what brings the frozen model."""
        self.base, self.engine = base, engine
        held = adapters.held
        self._exporter = Exporter(held.shards, adapters.group, bucket_bytes=bucket_bytes)
        self._kept = names_of_pairs(tensor.name for tensor in self._exporter.planned)
        targets = {target_of(name) for name in self._kept}
        self._said = described(
            rank=held.rank, alpha=held.alpha, targets=targets, rslora=held.rslora
        )

    def checksums(self) -> list[SliceChecksums]:
        """Returns those of the frozen model's last push."""
        return self.base.checksums()

    def push(self, *, version: int) -> Metrics:
        """Afterwards every engine answers under `version`: with the frozen model, which is sent
        where an engine has lost it, and the adapters of now.

        Raises as `EngineWeights.push`, and EngineError where processes got different adapters.
        """
        begin = time.perf_counter()
        metrics: Metrics = {}
        if not self._all_have_weights():
            metrics = self.base.push(version=version)
        self.engine.invalidate()  # it has the model, and not yet the adapters
        pairs = {PREFIX + name: tensor for name, tensor in self._exporter if name in self._kept}
        self._refuse_different(pairs.values())
        self.engine.load_adapter(pairs, self._said, version=version)
        size = float(sum(tensor.nbytes for tensor in pairs.values()))
        moved = metrics.get("push_bytes", 0.0) + size
        least = metrics.get("push_bytes_least", 0.0) + size
        return {
            "push_seconds": time.perf_counter() - begin,
            "push_bytes": moved,
            "push_bytes_least": least,
            "push_ratio": moved / least,
            "push_buffer_bytes": max(metrics.get("push_buffer_bytes", 0.0), size),
            "push_adapter_bytes": size,
        }

    def _all_have_weights(self) -> bool:
        have = torch.tensor(int(self.engine.has_weights), device=self.base.shards.device)
        dist.all_reduce(have, op=dist.ReduceOp.MIN)
        return bool(have)

    def _refuse_different(self, tensors: Iterable[Tensor]) -> None:
        """Raises EngineError, on every process, where not all got the same."""
        sums = torch.stack(list(_sums(tensors)))
        least, most = sums.clone(), sums.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise EngineError("Processes got different adapters in a push; no engine has any now.")


def _sums(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield checksums(tensor.contiguous()[None])[0]
