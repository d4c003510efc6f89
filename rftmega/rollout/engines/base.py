"""Base class of inference engines: sleep and wake, weight versions, and the refusal to generate
before the trainer has pushed (synchronised) its weights.
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
    """EngineStatus tells whether an engine has device memory allocated for weights or KV cache:
    WAKEUP if so, else SLEEPED.
    """

    SLEEPED = 0
    WAKEUP = 1


class Engine(ABC):
    """Engine is the handle through which one trainer process uses an inference engine: it generates
    completions and receives the policy's weights by pushes (weight syncs).

    `version` is the version of the policy's weights that the engine generates with; None if no push
    came since the engine started or slept.
    """

    slots = sys.maxsize  # completions that it generates concurrently
    row_tokens = sys.maxsize  # prompt and completion together
    draft_tokens = 0  # most tokens of a draft in speculative decoding
    # access to its parameters during a load, if a push may fill them (`weights.destinations`)
    destinations: Any = None

    def __init__(self) -> None:
        self.version: int | None = None
        self.has_weights = False  # the model's, since the last sleep; adapters may be missing
        self._held: set[str] = {"weights", "kv_cache"}  # what is in device memory

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> WeightSync:
        """Plans weight pushes and returns the WeightSync whose `push` sends the policy's weights to
        the engines of all processes; a collective. Drops the engine's weights and puts the engine
        to sleep.

        `shards`: the local tensors of the policy, with the blocks of HF tensors in them.
        `bucket_bytes`: most bytes that are sent at a time.
        """
        sync = weights.EngineWeights(shards, self, bucket_bytes=bucket_bytes)
        self.sleep()
        return sync

    def adapter_sync(
        self, frozen: Sequence[Shard], adapters: AdapterSource, *, bucket_bytes: int
    ) -> WeightSync:
        """Plans weight pushes for a frozen base model with trained LoRA adapters and returns their
        WeightSync; a collective like `weight_sync`. The adapters are sent separately, without
        merging them into the base model.

        `frozen`: the local tensors of the base model. `adapters`: source of the adapters' tensors
        at each push. `bucket_bytes`: most bytes that are sent at a time.
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
        """Generates one completion per prompt, with the seed in `seeds` at the prompt's index;
        temperature 0 is greedy. Returns the completions in the order of the prompts.

        `finished(numbers, completions)` is called whenever completions end, while the engine still
        generates others; `numbers` are the indices of their prompts. Raises the same errors as
        `serve`.
        """
        batch = PromptBatch(prompts, seeds, finished)
        self.serve(batch, sampling=sampling)
        return batch.completions

    @spanned("generate")
    def serve(self, requests: Requests, *, sampling: Sampling) -> None:
        """Generates completions for the requests that `requests.take` returns, and passes them to
        `requests.finished`, until there are no more requests or `requests.stopped` returns True;
        unfinished requests are then aborted. Wakes a sleeping engine.

        Raises EngineError if no weights were pushed since the start or the last sleep; EngineFault
        if the engine broke down, after which `restart` and a new push may help.
        """
        if self.version is None:
            raise EngineError(
                "The engine holds no weights (none were pushed since it started or slept). Push first."
            )
        self.wake()
        self._serve(requests, sampling)

    @spanned("load weights")
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replaces all weights by `named_tensors` (HF names and shapes), as the weights of the
        policy's version `version`. The engine can't generate until the last tensor has been loaded.

        A sleeping engine allocates memory only for the weights, since the KV cache may not fit next
        to the trainer yet.
        """
        self.invalidate()
        self.has_weights = False
        self._take("weights")
        self._load_weights(named_tensors)
        self.version, self.has_weights = version, True

    def load_adapter(self, pairs: dict[str, Tensor], said: dict[str, Any], *, version: int) -> None:
        """Replaces the LoRA adapter of the policy by that of version `version`. `pairs`: its A and
        B matrices, by PEFT name; `said`: PEFT's adapter config as a dictionary.

        Raises NotImplementedError if the class of the engine does not support adapters.
        """
        self.invalidate()
        self._load_adapter(pairs, said)
        self.version = version

    def use_adapter(self, adapter: str) -> None:
        """Selects the LoRA adapter of all later requests by its name; "" is the policy's adapter.
        Raises NotImplementedError for any other name if the class of the engine supports no further
        adapters.
        """
        if adapter:
            raise NotImplementedError(f"{type(self).__name__} has no other adapters.")

    def trace_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads `named_tensors`, special tensors that record which of their elements the engine
        reads, so that a push can send just these elements. The engine's weights are lost.
        """
        self.invalidate()
        self.has_weights = False
        self._take("weights")
        self._load_weights(named_tensors)

    def invalidate(self) -> None:
        """Marks the weights as invalid: the engine refuses requests until a push is complete."""
        self.version = None

    def restart(self) -> None:
        """Resets the engine after it or another engine of the run broke down: puts the engine to
        sleep, so that the next request needs a push first.
        """
        self.sleep()

    def sleep(self) -> None:
        """Frees the engine's device memory, including the weights: the next request needs a push
        first.
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

    def draft_counts(self) -> list[int]:
        """Returns the drafts and accepted tokens of this process's engine since the last call, by
        position (`draft_counts.DraftCounts.take`): 2 `draft_tokens` numbers.
        """
        return [0] * (2 * self.draft_tokens)

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
