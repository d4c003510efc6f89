"""Reward of a task library: the library that created a task scores the answer (data.train:
"reasoning_gym://...").
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from rftmega.config.task_libraries import task_source, worker_command, worker_environment
from rftmega.core.types import Prompt
from rftmega.rewards.part import Answer, Undecided
from rftmega.rewards.scorer_process import ScorerPool, ScorerProcess

log = logging.getLogger(__name__)
SECONDS = 10.0  # time limit of one score
SOURCE, INDEX = "task_source", "task_index"  # columns of a library's record
Asked = tuple[str, int, str | None]  # (tasks, index, answer)


class LibraryScorer(ScorerProcess):
    """LibraryScorer is a process of a task library that scores answers."""

    def __init__(self) -> None:
        super().__init__(
            worker_command("score"),
            SECONDS,
            part="reward.task_library",
            hint="is reasoning-gym there?",
            environment=worker_environment(),
        )


class TaskLibraryPart:
    """TaskLibraryPart is the reward component that lets the library of a task score the answer which
    `answer_in` finds in a response (None: no answer). It gives None for a task of no library.

    An answer for which the scorer raises an exception scores 0. If the scorer takes too long or
    ends its process, the score is Undecided.
    """

    def __init__(self, answer_in: Callable[[str], str | None], *, workers: int):
        """`workers`: number of processes that score in parallel."""
        self.answer_in = answer_in
        self.pool = ScorerPool(LibraryScorer, workers=workers, name="task-library")
        self._raised: set[str] = set()  # data sets whose scorer has raised, which is logged once

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        found = [_task_of(answer.record) for answer in answers]
        asked = [
            (*task, self.answer_in(answer.response))
            for answer, task in zip(answers, found, strict=True)
            if task is not None
        ]
        scores = iter(self.pool.map(self._score, asked))
        return [None if task is None else next(scores) for task in found]

    def _score(self, process: LibraryScorer, asked: Asked) -> float:
        told = process.ask([*asked, process.seconds])
        if not isinstance(told, dict) or "lost" in told:
            return Undecided()
        if (said := told.get("raised")) is not None:
            self._tell(asked[0].partition("?")[0], said)
            return 0.0
        return float(told["score"])

    def _tell(self, name: str, said: str) -> None:
        if name not in self._raised:
            self._raised.add(name)
            log.info("the scorer of %s raised %s; such an answer scores 0", name, said)


def is_of_library(prompt: Prompt) -> bool:
    """Returns whether a task library created this prompt's record."""
    return _task_of(prompt.record) is not None


def _task_of(record: str) -> tuple[str, int] | None:
    """Returns (tasks, index) of a record given as JSON; None for a record of no library."""
    columns: dict[str, Any] = json.loads(record) if record else {}
    source, index = columns.get(SOURCE), columns.get(INDEX)
    if not isinstance(source, str) or not isinstance(index, int):
        return None
    known = task_source(source)
    return None if known is None else (known.tasks, index)
