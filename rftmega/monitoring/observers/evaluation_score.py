"""The main score of an evaluation set: its metric in metrics.jsonl, and what people call it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rftmega.config import RunConfig
from rftmega.monitoring.history import Step
from rftmega.monitoring.observers.evaluate import ACCURACY, metric_of

MEAN = "mean score"
# built-in reward components whose scores are 0 or 1, so that their mean is an accuracy
BINARY = frozenset({"code", "exact_match", "format", "math", "multiple_choice"})


class EvaluationScore(NamedTuple):
    """EvaluationScore names the main score of one evaluation set."""

    set: str  # name of the evaluation set, "" for a single one
    metric: str  # its name in metrics.jsonl
    what: str  # accuracy, mean score or cross-entropy; "": see `named`

    def named(self, history: Sequence[Step]) -> "EvaluationScore":
        """Returns the score with the name that the metrics in `history` allow: it is an accuracy if
        its mean was the share of scores of 1 and more in all evaluations, and not 0 in all.
        """
        share = metric_of(self.set, ACCURACY)
        known = [(line[self.metric], line.get(share)) for line in history if self.metric in line]
        is_share = all(mean == right for mean, right in known) and any(mean for mean, _ in known)
        return self._replace(what=self.what or (ACCURACY if is_share else MEAN))

    def text(self, value: float) -> str:
        """Returns the score's `value` as text: an accuracy in percent, others with three digits."""
        return f"{value:.1%}" if self.what == ACCURACY else f"{value:.3g}"

    @property
    def title(self) -> str:
        """Returns what the score is, with the name of its evaluation set if there are several."""
        return f"{self.what} of {self.set}" if self.set else self.what


def evaluation_scores(config: RunConfig, names: Iterable[str]) -> list[EvaluationScore]:
    """Returns the main score of each evaluation set in `names`. In reinforcement learning it is the
    mean of the reward component trainer.eval_accuracy.
    """
    part, what = ACCURACY, ACCURACY
    if config.algorithm.task == "rl":
        part = config.trainer.eval_accuracy
        what = ACCURACY if part in BINARY else ""
    elif config.algorithm.task == "sft":
        part, what = "cross_entropy", "cross-entropy"
    return [EvaluationScore(name, metric_of(name, part), what) for name in names]
