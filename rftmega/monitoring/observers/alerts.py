"""Warnings about common training problems, such as collapsing entropy, that show in the metrics of
the last steps.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer

WINDOW = 5  # number of steps averaged; a single step may be an outlier
AGAIN = 100  # steps before the same warning is repeated
log = logging.getLogger(__name__)


class Means(NamedTuple):
    """Means holds the mean of each metric over the first WINDOW steps of a run, and over its last
    WINDOW steps so far.
    """

    first: Mapping[str, float]  # over the first WINDOW steps of the run
    last: Mapping[str, float]  # over the last WINDOW steps


class Alert(NamedTuple):
    """Alert is a check for one training problem: `says` returns the text of the warning, or "" if
    the metrics do not show the problem.
    """

    name: str  # title of its section in docs/monitoring.md
    says: Callable[[Means], str]


def rewards_equal(means: Means) -> str:
    share = means.last.get("varied", 1.0)
    if share > 0.1 or not share:  # `health.MixedGroups` warns if there is none at all
        return ""
    return (
        f"the completions of {1 - share:.0%} of the prompts score alike, so that next to nothing is learnt. Are the prompts too "
        "hard or too easy, or does the reward not read the answer?"
    )


def entropy_collapsing(means: Means) -> str:
    now, before = means.last.get("entropy", math.inf), means.first.get("entropy", 0.0)
    if now >= 0.2 * before:
        return ""
    return (
        f"the policy's entropy is {now:.2g} nats a token, from {before:.2g} in the first steps: it hardly tries anything else "
        "any more. Lower the learning rate, or give the entropy a bonus (algorithm.entropy_coef)."
    )


def length_at_the_cap(means: Means) -> str:
    share = means.last.get("truncated", 0.0)
    if share < 0.3:
        return ""
    return (
        f"{share:.0%} of the completions are cut off at rollout.max_response_tokens, and score as they stand. Raise it, or leave "
        "them out (algorithm.drop_truncated)."
    )


def gap_rising(means: Means) -> str:
    now, before = means.last.get("logprob_gap_mean", 0.0), means.first.get("logprob_gap_mean", 0.0)
    if now < max(5 * before, 1e-4):
        return ""
    return (
        f"engine and trainer differ by {now:.2g} nats a token, from {before:.2g} in the first steps. The completions are less "
        "and less those of the policy that learns from them (docs/push.md)."
    )


def clipped(means: Means) -> str:
    share = means.last.get("clip_fraction", 0.0)
    if share < 0.3:
        return ""
    return (
        f"the clip takes the gradient of {share:.0%} of the tokens: the policy moves too far between rollout and update. Lower "
        "the learning rate, or algorithm.updates_per_epoch."
    )


def engine_idle(means: Means) -> str:
    whole, busy = means.last.get("seconds_rollout", 0.0), means.last.get("work_rollout", math.inf)
    if whole < 1 or busy > 0.5 * whole:
        return ""
    return (
        f"engines generate in {busy / whole:.0%} of the rollout's {whole:.0f} s and wait in the rest: for rewards, for tools, or "
        "for the longest completions of others."
    )


ALERTS = (
    Alert("Rewards all equal", rewards_equal),
    Alert("Entropy collapsing", entropy_collapsing),
    Alert("Length at the cap", length_at_the_cap),
    Alert("Gap rising", gap_rising),
    Alert("Clipped share", clipped),
    Alert("Engine idle", engine_idle),
)


class Alerts(Observer):
    """Alerts is a callback that logs the warning of each check in ALERTS when its problem appears,
    and again every AGAIN steps while the problem persists.
    """

    def __init__(self, history: Path):
        """Stores the path of metrics.jsonl (`history`), from which a resumed run reads the metrics
        of its first steps.
        """
        self.history = history
        self.first: list[Mapping[str, Any]] = []
        self.last: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self.told: dict[str, int] = {}  # alert -> the step of its last warning

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        if not trainer.resumed or not self.history.is_file():
            return
        with self.history.open() as file:
            for line in file:
                self._note(json.loads(line))

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self._note(metrics | {"step": trainer.step})
        if len(self.last) < WINDOW:
            return
        means = Means(means_of(self.first), means_of(self.last))
        for alert in ALERTS:
            words = alert.says(means)
            if words and trainer.step - self.told.get(alert.name, -AGAIN) >= AGAIN:
                self.told[alert.name] = trainer.step
                log.warning("%s (docs/monitoring.md): %s", alert.name, words)

    def _note(self, metrics: Mapping[str, Any]) -> None:
        if "reward" not in metrics:  # the evaluation before the first step
            return
        if len(self.first) < WINDOW:
            self.first.append(metrics)
        self.last.append(dict(metrics))


def means_of(steps: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean of each metric over the steps in which it has a finite value. `steps`:
    metrics of each step, by name.
    """
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            if value is not None and math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
