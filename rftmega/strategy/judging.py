"""Rewards of finished answers, while the engine still works on the others."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

from rftmega.interfaces import Reward
from rftmega.types import Completion, Prompt

THREADS = 8  # batches that are scored at a time: what takes long waits for a server or a process, not for this one

Scores = list[dict[str, float]]


class Judging:
    """Scores what it is told of in threads of its own; use it as a context."""

    def __init__(self, reward: Reward, prompts: Sequence[Prompt]):
        self.reward, self.prompts = reward, prompts
        self._pool = ThreadPoolExecutor(THREADS)
        self._scores: list[tuple[Sequence[int], Future[Scores]]] = []

    def __enter__(self) -> "Judging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def finished(self, places: Sequence[int], completions: Sequence[Completion]) -> None:
        """The answers to the prompts at `places` are there."""
        asked = [self.prompts[place] for place in places]
        self._scores.append((list(places), self._pool.submit(self.reward, asked, list(completions))))

    def scored(self, completions: Sequence[Completion]) -> list[Completion]:
        """All completions, with their scores. Waits for the last; raises what the reward raised."""
        found = dict(pair for places, scores in self._scores for pair in zip(places, scores.result(), strict=True))
        return [replace(completion, scores=found[place]) for place, completion in enumerate(completions)]
