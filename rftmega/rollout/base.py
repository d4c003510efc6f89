"""Engine holds what all engines have in common: it sleeps and wakes, and refuses to answer with
weights it was never given.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rftmega import weights
from rftmega.device.spans import span, spanned
from rftmega.errors import EngineError
from rftmega.interfaces import WeightSync
from rftmega.media.placed import Placed
from rftmega.shards import Shard
from rftmega.types import Completion, Prompt


class Request(NamedTuple):
    """Request asks an engine for one completion."""

    token_ids: Sequence[int]
    seed: int
    rollout: int = 0  # requests of one rollout stay on one server
    expected: float = 0.0  # tokens of the answer; several servers share the work by it
    # of the tokens, which have a placeholder for each feature
    pictures: tuple[Placed, ...] = ()


class Requests(Protocol):
    """Requests tells an engine what to answer, also while it answers others.

    Every process of an engine asks after the same steps.
    """

    def take(self, room: int) -> Sequence[Request]:
        """Returns further requests for an engine with room for `room` more, at times some more than
        that; none where there is nothing now.

        Requests are numbered in this order. An engine that has answered all and gets none is done.
        """

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Receives completions as soon as they are there, each once."""

    def stopped(self) -> bool:
        """Says, after an engine's step, whether it is to leave what is not finished."""


Finished = Callable[[Sequence[int], Sequence[Completion]], None]


class PromptBatch:
    """PromptBatch is Requests that are all there at once."""

    def __init__(self, prompts: Sequence[Prompt], seeds: Sequence[int], finished: Finished):
        pairs = zip(prompts, seeds, strict=True)
        self._requests = [
            Request(prompt.token_ids, seed, rollout, pictures=prompt.pictures)
            for rollout, (prompt, seed) in enumerate(pairs)
        ]
        self._told = finished
        self._completions: dict[int, Completion] = {}

    def take(self, room: int) -> Sequence[Request]:
        requests, self._requests = self._requests, []
        return requests

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        self._completions |= zip(numbers, completions, strict=True)
        self._told(numbers, completions)

    def stopped(self) -> bool:
        return False

    @property
    def completions(self) -> list[Completion]:
        """Returns the completions in the order of the prompts."""
        return [completion for _, completion in sorted(self._completions.items())]


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
        self._held: set[str] = {"weights", "kv_cache"}  # what is in the device's memory

    def weight_sync(self, shards: Sequence[Shard], *, bucket_bytes: int) -> WeightSync:
        """Returns what brings the policy's shards into the engines of all processes, which call
        this together.

        It plans the push; the engine has no weights afterwards, and sleeps.
        """
        sync = weights.EngineWeights(shards, self, bucket_bytes=bucket_bytes)
        self.sleep()
        return sync

    @property
    def status(self) -> EngineStatus:
        return EngineStatus.WAKEUP if self._held else EngineStatus.SLEEPED

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        temperature: float,
        finished: Finished = _nobody,
    ) -> list[Completion]:
        """Generates one completion a prompt, sampled with its own seed; temperature 0 is greedy.

        `finished` is told of every completion once, as soon as there is news, while the others are
        still being generated. Raises as `answer` does.
        """
        batch = PromptBatch(prompts, seeds, finished)
        self.answer(batch, temperature=temperature)
        return batch.completions

    @spanned("generate")
    def answer(self, requests: Requests, *, temperature: float) -> None:
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
        self._answer(requests, temperature)

    @spanned("load weights")
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replaces all weights by `named_tensors` (HF names and shapes); stale until the last one
        has arrived.

        Of a sleeping engine it wakes the weights' memory only, so that the cache need not fit
        beside the trainer yet.
        """
        self.invalidate()
        self._take("weights")
        self._load_weights(named_tensors)
        self.version = version

    def trace_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads tensors that only record what is asked of them, so that a push can be planned; the
        weights are lost.
        """
        self.invalidate()
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
            self._held, self.version = set(), None

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

    @abstractmethod
    def _answer(self, requests: Requests, temperature: float) -> None: ...

    @abstractmethod
    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _sleep(self) -> None: ...

    @abstractmethod
    def _wake(self, parts: Sequence[str]) -> None: ...
