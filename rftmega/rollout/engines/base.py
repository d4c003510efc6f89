"""Base class of in-process inference engines: sleep and wake, weight versions, and the refusal to
generate before weights were pushed.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from rftmega import weights
from rftmega.core.errors import EngineError
from rftmega.core.interfaces import WeightSync
from rftmega.core.shards import AdapterSource, Shard
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.requests import Finished, PromptBatch, Requests
from rftmega.runtime.device.spans import span, spanned


def _nobody(numbers: Sequence[int], completions: Sequence[Completion]) -> None: ...


class EngineStatus(Enum):
    """EngineStatus is whether an engine has device memory allocated: WAKEUP if so, else SLEEPED."""

    SLEEPED = 0
    WAKEUP = 1


class Engine(ABC):
    """Engine is one process's handle of an inference engine.

    `version` is the version of the policy's weights that the engine generates with; None before a
    push.
    """

    slots = sys.maxsize  # completions that it generates concurrently
    row_tokens = sys.maxsize  # prompt and completion together
    # access to its parameters during a load, if a push may fill them (`weights.destinations`)
    destinations: Any = None

    def __init__(self) -> None:
        self.version: int | None = None
        self.has_weights = False  # the model's, since the last sleep; adapters may be missing
        self._held: set[str] = {"weights", "kv_cache"}  # what is in device memory

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> WeightSync:
        """Returns the WeightSync that pushes the policy's shards to the engines of all processes; a
        collective. `bucket_bytes`: most bytes that are sent at a time.

        Planning the push drops the engine's weights and puts the engine to sleep.
        """
        sync = weights.EngineWeights(shards, self, bucket_bytes=bucket_bytes)
        self.sleep()
        return sync

    def adapter_sync(
        self, frozen: Sequence[Shard], adapters: AdapterSource, *, bucket_bytes: int
    ) -> WeightSync:
        """Returns the WeightSync that pushes the shards of a frozen base model and its adapters
        separately; a collective like `weight_sync`.
        """
        base = self.weight_sync(frozen, bucket_bytes=bucket_bytes)
        return weights.AdapterWeights(base, adapters, self, bucket_bytes=bucket_bytes)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus.WAKEUP if self._held else EngineStatus.SLEEPED

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        finished: Finished = _nobody,
    ) -> list[Completion]:
        """Generates one completion per prompt, each sampled with its own seed; temperature 0 is
        greedy. Returns the completions in the order of the prompts.

        `finished(numbers, completions)` is called when completions end, while other completions are
        still being generated; a number is the index of a prompt. Raises the same errors as `serve`.
        """
        batch = PromptBatch(prompts, seeds, finished)
        self.serve(batch, sampling=sampling)
        return batch.completions

    @spanned("generate")
    def serve(self, requests: Requests, *, sampling: Sampling) -> None:
        """Serves requests until none are left or `requests.stopped` returns True; unfinished
        requests are then aborted. Wakes a sleeping engine.

        Raises EngineError if no weights were pushed since the start or the last sleep; EngineFault
        if the engine broke down, after which `restart` and a push may help.
        """
        if self.version is None:
            raise EngineError(
                "The engine holds no weights (none were pushed since it started or slept). Push first."
            )
        self.wake()
        self._serve(requests, sampling)

    @spanned("load weights")
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replaces all weights by `named_tensors` (HF names and shapes). The engine can't generate
        until the last tensor has been loaded.

        On a sleeping engine, allocates memory only for the weights, so that the KV cache need not
        fit next to the trainer yet.
        """
        self.invalidate()
        self.has_weights = False
        self._take("weights")
        self._load_weights(named_tensors)
        self.version, self.has_weights = version, True

    def load_adapter(self, pairs: dict[str, Tensor], said: dict[str, Any], *, version: int) -> None:
        """Replaces the adapter: `pairs` are its matrices by PEFT name, `said` is PEFT's adapter
        config. Only engines that were built for an adapter support this.
        """
        self.invalidate()
        self._load_adapter(pairs, said)
        self.version = version

    def use_adapter(self, adapter: str) -> None:
        """Selects the adapter that later requests are served with, by name; "" is the policy's
        adapter. Raises NotImplementedError if the engine was not built for several adapters.
        """
        if adapter:
            raise NotImplementedError(f"{type(self).__name__} has no other adapters.")

    def trace_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads tensors that only record which of their elements are read, to plan a push; the
        engine's weights are lost.
        """
        self.invalidate()
        self.has_weights = False
        self._take("weights")
        self._load_weights(named_tensors)

    def invalidate(self) -> None:
        """Marks the weights as invalid: the engine refuses requests until the
        next complete push.
        """
        self.version = None

    def restart(self) -> None:
        """Resets the engine after a fault of this or another engine: puts it to sleep, so that it
        needs a push.
        """
        self.sleep()

    def sleep(self) -> None:
        """Frees the engine's device memory. The weights are dropped, so a push must come before the
        next request.
        """
        if self._held:
            with span("sleep"):
                self._sleep()
            self._held, self.version, self.has_weights = set(), None, False

    def wake(self) -> None:
        """Allocates device memory for weights and KV cache; does nothing if the engine is awake."""
        self._take("weights", "kv_cache")

    def _take(self, *parts: str) -> None:
        missing = [part for part in parts if part not in self._held]
        if missing:
            with span("wake"):
                self._wake(missing)
            self._held |= set(missing)

    def close(self) -> None:  # noqa: B027  most engines need no cleanup
        """Shuts the engine down; call it before the process groups are destroyed."""

    def _load_adapter(self, pairs: dict[str, Tensor], said: dict[str, Any]) -> None:
        raise NotImplementedError(f"{type(self).__name__} takes no adapters.")

    @abstractmethod
    def _serve(self, requests: Requests, sampling: Sampling) -> None: ...

    @abstractmethod
    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _sleep(self) -> None: ...

    @abstractmethod
    def _wake(self, parts: Sequence[str]) -> None: ...
