"""Engine holds what all engines have in common: it sleeps and wakes, and refuses to answer with
weights it was never given.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from rftmega import weights
from rftmega.device.spans import span, spanned
from rftmega.errors import EngineError
from rftmega.interfaces import WeightSync
from rftmega.parallel.watchdog import mark
from rftmega.rollout.request_order import Lengths
from rftmega.shards import Shard
from rftmega.types import Completion, Prompt

# places among the prompts, their answers
Finished = Callable[[Sequence[int], Sequence[Completion]], None]


# asked after every step of an engine: shall it leave what is not finished?
Stop = Callable[[], bool]


More = Callable[[int], Sequence[tuple[Prompt, int]]]
"""For so many answers there is room: further prompts and seeds, some more than that at times, whose
places follow those so far. None: nothing now. Every process of an engine asks after the same steps,
for as many.
"""


def _nobody(places: Sequence[int], completions: Sequence[Completion]) -> None: ...


def _never() -> bool:
    return False


def _nothing(room: int) -> Sequence[tuple[Prompt, int]]:
    return ()


class EngineStatus(Enum):
    """EngineStatus tells whether the engine holds its memory."""

    SLEEPED = 0
    WAKEUP = 1


class Engine(ABC):
    """One engine, as one process holds it.

    `version` is the policy version that it answers under; None before a push.
    """

    slots = sys.maxsize  # answers that it generates side by side
    # its parameters while it loads, where a push may fill them itself (`weights.destinations`)
    destinations: Any = None

    def __init__(self) -> None:
        self.version: int | None = None
        self.lengths = Lengths()  # of answers; whoever sends requests asks and tells it
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
        Wakes a sleeping engine.

        `finished` is told of every completion once, as soon as there is news, while the others are
        still being generated. Raises EngineError where weights never arrived, or were dropped in a
        sleep and not pushed again; EngineFault where the engine broke down, after which `restart`
        and a push may help.
        """
        found = self.generate_until(
            prompts, seeds=seeds, temperature=temperature, finished=finished, stop=_never
        )
        return [completion for completion in found if completion is not None]

    @spanned("generate")
    def generate_until(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        temperature: float,
        finished: Finished = _nobody,
        stop: Stop,
        more: More = _nothing,
    ) -> list[Completion | None]:
        """Generates until `stop`, asked after every engine step, says so: what is not finished then
        is aborted, and None.

        Whenever the engine has room it asks for `more`, and answers that, too.
        """
        if self.version is None:
            raise EngineError(
                "The engine holds no weights (none were pushed since it started or slept). Push first."
            )
        self.wake()

        def told(places: Sequence[int], completions: Sequence[Completion]) -> None:
            mark()
            finished(places, completions)

        return self._generate(prompts, seeds, temperature, told, stop, more) if prompts else []

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
    def _generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        finished: Finished,
        stop: Stop,
        more: More,
    ) -> list[Completion | None]: ...

    @abstractmethod
    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _sleep(self) -> None: ...

    @abstractmethod
    def _wake(self, parts: Sequence[str]) -> None: ...
