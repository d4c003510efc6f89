"""Engine holds what all engines have in common: it sleeps and wakes, and refuses to answer with
weights it was never given.
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
    """EngineStatus tells whether the engine holds its memory."""

    SLEEPED = 0
    WAKEUP = 1


class Engine(ABC):
    """One engine, as one process holds it.

    `version` is the policy version that it answers under; None before a push.
    """

    slots = sys.maxsize  # answers that it generates side by side
    row_tokens = sys.maxsize  # context and answer together
    # its parameters while it loads, where a push may fill them itself (`weights.destinations`)
    destinations: Any = None

    def __init__(self) -> None:
        self.version: int | None = None
        self.has_weights = False  # of the model, since the last sleep; adapters may be missing
        self._held: set[str] = {"weights", "kv_cache"}  # what is in the device's memory

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> WeightSync:
        """Returns what brings the policy's shards into the engines of all processes, which call
        this together.

        It plans the push; the engine has no weights afterwards, and sleeps.
        """
        sync = weights.EngineWeights(shards, self, bucket_bytes=bucket_bytes)
        self.sleep()
        return sync

    def adapter_sync(
        self, frozen: Sequence[Shard], adapters: AdapterSource, *, bucket_bytes: int
    ) -> WeightSync:
        """Returns what brings a frozen model's shards and its adapters, each by itself, as
        `weight_sync` does a policy's shards.
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
        """Generates one completion a prompt, sampled with its own seed; temperature 0 is greedy.

        `finished` is told of every completion once, as soon as there is news, while the others are
        still being generated. Raises as `answer` does.
        """
        batch = PromptBatch(prompts, seeds, finished)
        self.serve(batch, sampling=sampling)
        return batch.completions

    @spanned("generate")
    def serve(self, requests: Requests, *, sampling: Sampling) -> None:
        """Answers requests until there are none left, or they are stopped: what is not finished
        then is aborted. Wakes a sleeping engine.

        Raises EngineError where weights never arrived, or were dropped in a sleep and not pushed
        again; EngineFault where the engine broke down, after which `restart` and a push may help.
        """
        if self.version is None:
            raise EngineError(
                "The engine holds no weights (none were pushed since it started or slept). Push first."
            )
        self.wake()
        self._serve(requests, sampling)

    @spanned("load weights")
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replaces all weights by `named_tensors` (HF names and shapes); stale until the last one
        has arrived.

        Of a sleeping engine it wakes the weights' memory only, so that the cache need not fit
        beside the trainer yet.
        """
        self.invalidate()
        self.has_weights = False
        self._take("weights")
        self._load_weights(named_tensors)
        self.version, self.has_weights = version, True

    def load_adapter(self, pairs: dict[str, Tensor], said: dict[str, Any], *, version: int) -> None:
        """Replaces the adapter beside the model's weights: its matrices by PEFT's names, and PEFT's
        config. Only an engine that is made for it takes one.
        """
        self.invalidate()
        self._load_adapter(pairs, said)
        self.version = version

    def answer_with(self, adapter: str) -> None:
        """Has it answer with the adapter of this name from now on; "": the policy's. Only an engine
        that is made for several has others.
        """
        if adapter:
            raise NotImplementedError(f"{type(self).__name__} has no other adapters.")

    def trace_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads tensors that only record what is asked of them, so that a push can be planned; the
        weights are lost.
        """
        self.invalidate()
        self.has_weights = False
        self._take("weights")
        self._load_weights(named_tensors)

    def invalidate(self) -> None:
        """Invalidates the weights: refuses to answer until a whole push has landed."""
        self.version = None

    def restart(self) -> None:
        """Restarts after a fault, of this engine or of another: it holds nothing now, and waits for
        a push.
        """
        self.sleep()

    def sleep(self) -> None:
        """Gives the device's memory back; weights are dropped, so that a push must come before the
        next answer.
        """
        if self._held:
            with span("sleep"):
                self._sleep()
            self._held, self.version, self.has_weights = set(), None, False

    def wake(self) -> None:
        """Takes the memory again; nothing happens where the engine is awake."""
        self._take("weights", "kv_cache")

    def _take(self, *parts: str) -> None:
        missing = [part for part in parts if part not in self._held]
        if missing:
            with span("wake"):
                self._wake(missing)
            self._held |= set(missing)

    def close(self) -> None:  # noqa: B027  most engines hold nothing that needs it
        """Ends the engine; call it before the process groups go."""

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
