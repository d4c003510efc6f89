"""Pushes LoRA adapters to engines as adapters: the frozen base model is sent once, and the
unrounded adapter matrices with each push.

Merging adapters into bfloat16 weights rounds small updates away (docs/adapters.md); an engine that
adds the adapter's output to the layer's output does not lose them.
"""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.converters.adapters import target_of
from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.interfaces import WeightSync
from rftmega.core.shards import AdapterSource
from rftmega.core.types import Metrics, SliceChecksums
from rftmega.models.hf.peft_folder import PREFIX, described, names_of_pairs
from rftmega.weights.gather import Exporter
from rftmega.weights.push import is_of_a_connection
from rftmega.weights.slice_sums import sum_of


class AdapterPairs:
    """AdapterPairs gathers the LoRA matrices of the policy, whose shards the processes of
    `adapters.group` hold, on every process. `bucket_bytes`: most bytes that are gathered at a time.
    """

    def __init__(self, adapters: AdapterSource, *, bucket_bytes: int):
        held = adapters.held
        self._exporter = Exporter(held.shards, adapters.group, bucket_bytes=bucket_bytes)
        self._kept = names_of_pairs(tensor.name for tensor in self._exporter.planned)
        targets = {target_of(name) for name in self._kept}
        # PEFT's adapter config
        self.said = described(rank=held.rank, alpha=held.alpha, targets=targets, rslora=held.rslora)
        self._where = held.shards[0].tensor.device
        self._sent: list[int] = []  # checksum of each matrix in the last push

    def gathered(self) -> dict[str, Tensor]:
        """Gathers the LoRA matrices of the whole model into newly allocated memory; a collective.
        Returns the matrices by their PEFT names.
        """
        return {PREFIX + name: tensor for name, tensor in self._exporter if name in self._kept}

    def for_push(self) -> tuple[dict[str, Tensor], list[int]]:
        """Gathers the LoRA matrices for a push; a collective. Returns the matrices by their PEFT
        names, and the checksum of each matrix; `checksums` later compares the current matrices with
        these checksums.
        """
        pairs = self.gathered()
        self._sent = _sums(pairs)
        return pairs, self._sent

    def checksums(self) -> list[SliceChecksums]:
        """Gathers the LoRA matrices, a collective, and returns for each matrix its checksum now and
        in the last push, as a SliceChecksums.
        """
        now = self.gathered()
        found = []
        for (name, tensor), held, sent in zip(now.items(), _sums(now), self._sent, strict=True):
            box = tuple((0, size) for size in tensor.shape)
            told = name.removeprefix(PREFIX)
            found.append(SliceChecksums(told, box, -1, -1, held, sent, sent))
        return found

    def everybodys(self, good: bool, *numbers: int) -> list[bool]:
        """Compares values between processes, a collective with the same result on all of them.
        Returns a list of flags: first whether `good` is true on every process, then for each of
        `numbers` (e.g. checksums) whether it is equal on every process.
        """
        mine = torch.tensor([int(good), *numbers], device=self._where)
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        first, *same = (least == most).tolist()
        return [bool(first and least[0]), *same]


class AdapterEngine(Protocol):
    """AdapterEngine is an in-process engine that serves one adapter."""

    @property
    def has_weights(self) -> bool:
        """Returns whether the base model's weights are loaded (the engine's
        sleep mode drops them).
        """
        ...

    def invalidate(self) -> None: ...

    def load_adapter(self, pairs: dict[str, Tensor], said: dict[str, Any], *, version: int) -> None:
        """Replaces the adapter with the matrices `pairs`, by their PEFT names. `said`: PEFT's
        adapter config; `version`: the weight version that the engine reports for its completions
        from now on.
        """
        ...


class AdapterWeights:
    """AdapterWeights is a WeightSync that sends LoRA adapters instead of merged weights. All
    processes must construct it and call its methods in the same order.
    """

    def __init__(
        self,
        base: WeightSync,
        adapters: AdapterSource,
        engine: AdapterEngine,
        *,
        bucket_bytes: int,
    ):
        """`base`: the WeightSync of the frozen base model; `adapters`: this process's shards of the
        LoRA matrices; `engine`: the engine in this process; `bucket_bytes`: most bytes that are
        gathered at a time.
        """
        self.base, self.engine = base, engine
        self._pairs = AdapterPairs(adapters, bucket_bytes=bucket_bytes)

    def checksums(self) -> list[SliceChecksums]:
        """Returns the checksums of the frozen base model's slices and one SliceChecksums per LoRA
        matrix; a collective.
        """
        return [*self.base.checksums(), *self._pairs.checksums()]

    def push(self, *, version: int) -> Metrics:
        """Loads the current adapters into the engine of every process as weight version `version`.
        The frozen base model is sent first if an engine has lost its weights. After a failure on
        any process, no engine generates until a push succeeds on all processes.

        Returns metrics of the push. Raises the same errors as `EngineWeights.push`.
        """
        begin = time.perf_counter()
        metrics: Metrics = {}
        if not all(self._pairs.everybodys(self.engine.has_weights)):
            metrics = self.base.push(version=version)
        self.engine.invalidate()  # it has the base model, but not yet the adapters
        try:
            size = float(self._push(version))
        except BaseException as error:
            self.engine.invalidate()  # it may have taken everything where another's did not
            if isinstance(error, RuntimeError) and is_of_a_connection(error):
                raise EngineFault(
                    f"Push {version} broke off: a process is gone ({error})."
                ) from error
            raise
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

    def _push(self, version: int) -> int:
        """Loads the current adapters into this process's engine. Returns the size of their matrices
        in bytes.
        """
        pairs, sums = self._pairs.for_push()
        failure: Exception | None = None
        try:
            self.engine.load_adapter(pairs, self._pairs.said, version=version)
        except Exception as error:
            failure = error
        told = self._pairs.everybodys(failure is None, *sums)
        if failure is not None:
            raise failure
        if not told[0]:
            raise EngineFault(
                f"Push {version} failed on another process; no engine has adapters now."
            )
        if not all(told):
            raise EngineError(
                f"Processes got different adapters in push {version}; no engine has any now."
            )
        return sum(tensor.nbytes for tensor in pairs.values())


def _sums(pairs: Mapping[str, Tensor]) -> list[int]:
    return [sum_of(tensor.contiguous()) for tensor in pairs.values()]
