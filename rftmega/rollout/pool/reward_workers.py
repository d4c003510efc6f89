"""Scores finished rollouts in threads while the engine still generates other rollouts."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

from rftmega.core.errors import RewardError
from rftmega.core.interfaces import Reward
from rftmega.core.types import Prompt, Rollout
from rftmega.runtime.device.spans import spanned
from rftmega.runtime.parallel.watchdog import mark

# concurrently scored batches: slow rewards wait for a server or another process
THREADS = 8
ROUND = 1.0  # seconds between checks for late rewards and stop requests

Scores = list[dict[str, float]]


class FinishedBatch(NamedTuple):
    """FinishedBatch holds rollouts that finished together, with the indices of their tasks
    (`places`). `scores` is the future of their scores; None if there is no reward.
    """

    places: Sequence[int]
    rollouts: Sequence[Rollout]
    scores: Future[Scores] | None

    def scored(self) -> dict[int, Rollout]:
        """Waits for the scores and returns the rollouts with them, by the index of the task. Raises
        the exception that the reward raised.
        """
        if self.scores is None:
            return dict(zip(self.places, self.rollouts, strict=True))
        known = zip(self.places, self.rollouts, self.scores.result(), strict=True)
        return {place: replace(rollout, scores=scores) for place, rollout, scores in known}


class Threads:
    """Threads runs reward calls in at most `most` daemon threads, which the process does not wait
    for at exit, since a reward may never return.
    """

    def __init__(self, most: int):
        self.most, self.started = most, 0
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, work: Callable[[], Scores]) -> Future[Scores]:
        future: Future[Scores] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # raised where the scores are awaited
                future.set_exception(error)

        self.queue.put(run)
        if self.started < self.most:
            self.started += 1
            threading.Thread(target=self._serve, name="reward", daemon=True).start()
        return future

    def close(self) -> None:
        """Ends each thread once the work submitted so far is done, without waiting for it."""
        for _ in range(self.started):
            self.queue.put(None)

    def _serve(self) -> None:
        while (work := self.queue.get()) is not None:
            work()


class RewardWorkers:
    """RewardWorkers scores finished rollouts in threads of its own; without a reward, it stores the
    rollouts unscored. Use it as a context manager.
    """

    def __init__(
        self, reward: Reward | None, prompts: Sequence[Prompt], *, limit: float = math.inf
    ):
        """Prepares scoring with `reward` (None: rollouts stay unscored). `prompts`: the prompts of
        all tasks; `limit`: seconds that the reward may take for one batch of rollouts.
        """
        self.reward, self.prompts, self.limit = reward, prompts, limit
        self.reports: list[FinishedBatch] = []
        self._began: dict[int, float] = {}  # index in `reports` -> when its scoring began
        self._threads = Threads(THREADS)

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for report in self.reports:
            if report.scores is not None:
                report.scores.cancel()
        self._threads.close()

    def finished(self, places: Sequence[int], rollouts: Sequence[Rollout]) -> None:
        """Starts scoring `rollouts`, which finished together. `places`: the index of each rollout's
        task, and so of its prompt. Lost rollouts get no score.
        """
        lost = [number for number, rollout in enumerate(rollouts) if rollout.lost]
        if lost and self.reward is not None:
            unscored = [replace(rollouts[number], scores={}) for number in lost]
            self.reports.append(FinishedBatch([places[number] for number in lost], unscored, None))
            kept = [number for number, rollout in enumerate(rollouts) if not rollout.lost]
            places = [places[number] for number in kept]
            rollouts = [rollouts[number] for number in kept]
            if not kept:
                return
        asked = [self.prompts[place] for place in places]
        number, scores = len(self.reports), None
        if self.reward is not None:
            reward = spanned("reward")(self.reward)

            def work() -> Scores:
                self._began[number] = time.monotonic()
                return reward(asked, list(rollouts))

            scores = self._threads.submit(work)
            scores.add_done_callback(lambda _: mark())
        self.reports.append(FinishedBatch(list(places), list(rollouts), scores))

    @property
    def answered(self) -> set[int]:
        """Returns the indices of the tasks whose rollouts have finished, scored or not."""
        return {place for report in self.reports for place in report.places}

    def settled(self, stop: Callable[[], bool], first: int = 0, end: int | None = None) -> bool:
        """Waits until the batches with indices from `first` up to `end` (exclusive) have their
        scores, or `stop` returns True. Returns whether all of these batches have their scores.

        Raises RewardError if the reward takes longer than the limit.
        """
        waiting = [report.scores for report in self.reports[first:end] if report.scores is not None]
        while wait(waiting, timeout=ROUND).not_done:
            self._refuse_late()
            if stop():
                return False
        return True

    def ready(self) -> dict[int, Rollout]:
        """Returns the finished rollouts that have their scores by now, by the index of the task,
        without waiting.
        """
        done = [
            report.scored()
            for report in self.reports
            if report.scores is None or report.scores.done()
        ]
        return {place: rollout for scored in done for place, rollout in scored.items()}

    def scored(self, first: int = 0, end: int | None = None) -> dict[int, Rollout]:
        """Waits for the scores of the batches with indices from `first` up to `end` (exclusive;
        default: all batches). Returns their rollouts, by the index of the task.
        """
        self.settled(lambda: False, first, end)
        return {
            place: rollout
            for report in self.reports[first:end]
            for place, rollout in report.scored().items()
        }

    def _refuse_late(self) -> None:
        now = time.monotonic()
        for number, begin in list(self._began.items()):
            report = self.reports[number]
            if report.scores is not None and not report.scores.done() and now - begin > self.limit:
                raise RewardError(
                    f"The reward gave no scores within reward.timeout={self.limit:g} s for {len(report.places)} completion(s), "
                    f"the first of them to prompt {self.prompts[report.places[0]].index}. Look at what it waits for, or raise "
                    "the limit."
                )
