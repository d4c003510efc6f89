"""ScoringPolicy: what a policy computes without training, alike on every backend."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import Column, Rows, TokenStats
from rftmega.models.kernels.teacher_terms import TeacherTerm


class ScoringPolicy:
    """ScoringPolicy is the base class of both backends' policies. It scores rows as a teacher, sets
    the distillation terms, and computes the log-probs of the starting policy.
    """

    manager: Any  # a MegatronModelManager or FSDPModelManager
    runner: Any  # a ModelRunner
    sum_of_frozen: int | None

    def log_probs(
        self, rows: Rows[Column], *, temperature: float | None = None
    ) -> TokenStats[Column]:
        """Returns the log-prob and entropy of every target token, without gradient."""
        raise NotImplementedError

    @property
    def starting_sum(self) -> int:
        """Returns the checksum of the weights that `starting_log_probs` scores with."""
        adapted = self.manager.adapters is not None
        found: int | None = self.manager.sum_of_base if adapted else self.sum_of_frozen
        assert found is not None, "this run reads no log-probs of the reference"
        return found

    def starting_log_probs(self, rows: Rows[Column]) -> TokenStats[Column]:
        """Returns the log-prob and entropy of every target token at temperature 1, under the base
        model if the policy has adapters, otherwise under the current weights: before training,
        those of the starting policy.
        """
        adapters = self.manager.adapters
        with nullcontext() if adapters is None else adapters.swapped_in():
            return self.log_probs(rows, temperature=1.0)

    def teach(self, rows: Rows[Any], request: TeacherRequest) -> TeacherScores:
        """Returns a teacher's numbers of the tokens of the mask of `rows`, see `ModelRunner.teach`."""
        found: TeacherScores = self.runner.teach(rows, request)
        return found

    def learn_from(self, terms: Sequence[TeacherTerm]) -> None:
        """Sets the distillation terms of the loss, one per teacher of `Experience.teachers`."""
        self.runner.terms = terms
