"""Rewards of finished answers, while the engine still works on the others."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

from rftmega.device.spans import spanned
from rftmega.interfaces import Reward
from rftmega.parallel.progress import mark
from rftmega.types import Completion, Prompt

THREADS = 8  # batches that are scored at a time: what takes long waits for a server or a process, not for this one

Scores = list[dict[str, float]]


class Report(NamedTuple):
    """Answers that finished together; `scores` is None where nobody scores them."""

    places: Sequence[int]
    completions: Sequence[Completion]
    scores: Future[Scores] | None

    def scored(self) -> dict[int, Completion]:
        """Place -> answer. Waits for the scores; raises what the reward raised."""
        if self.scores is None:
            return dict(zip(self.places, self.completions, strict=True))
        known = zip(self.places, self.completions, self.scores.result(), strict=True)
        return {place: replace(completion, scores=scores) for place, completion, scores in known}


class Judging:
    """Scores what it is told of in threads of its own, or keeps it as it is without a reward; use it as a context."""

    def __init__(self, reward: Reward | None, prompts: Sequence[Prompt]):
        self.reward, self.prompts = reward, prompts
        self.reports: list[Report] = []
        self._pool = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> "Judging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def finished(self, places: Sequence[int], completions: Sequence[Completion]) -> None:
        """The answers to the prompts at `places` are there."""
        asked = [self.prompts[place] for place in places]
        scores = None
        if self.reward is not None:
            scores = self._pool.submit(spanned("reward")(self.reward), asked, list(completions))
            scores.add_done_callback(lambda _: mark())
        self.reports.append(Report(list(places), list(completions), scores))

    @property
    def answered(self) -> set[int]:
        """Places of the answers that are there, scored or not."""
        return {place for report in self.reports for place in report.places}

    def wait(self, seconds: float) -> bool:
        """So long at most, for the scores of all that is there: whether they are."""
        return not wait([report.scores for report in self.reports if report.scores is not None], timeout=seconds).not_done

    def ready(self) -> dict[int, Completion]:
        """Place -> answer of those that have their scores by now."""
        done = [report.scored() for report in self.reports if report.scores is None or report.scores.done()]
        return {place: completion for scored in done for place, completion in scored.items()}

    def scored(self, first: int = 0, end: int | None = None) -> dict[int, Completion]:
        """Place -> answer of all reports, or of those from `first` to `end`. Waits for their scores."""
        return {place: completion for report in self.reports[first:end] for place, completion in report.scored().items()}
