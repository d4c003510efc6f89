"""Measures the gain of asynchronous training on a simulated clock: the trainer's schedules over an
engine whose completions have lognormal lengths.
"""

import heapq
import math
import random
from pathlib import Path
from typing import Any

from rftmega.core.interfaces import TakenGroups
from rftmega.core.types import Rollout, Sampling
from rftmega.trainer.rollout_schedules import Asynchronous, OneAhead, Synchronous
from tests.rollouts import rollout_of
from tests.unit.trainer.test_rollout_schedules import BATCH, SAMPLES, Streams, made

STEPS = 60
SIGMA, LONGEST = 1.0, 16.0  # sigma and maximum of lognormal lengths, in medians
SLOTS = BATCH * SAMPLES  # completions that the engine generates concurrently: all of a step


def length(seed: int) -> float:
    """Returns the length of a completion, which is also its duration."""
    drawn = random.Random(seed).gauss(0.0, SIGMA)
    return min(math.exp(drawn), LONGEST)


class Clocked(Streams):
    """Clocked generates completions on a simulated clock, in SLOTS slots that each process one at a
    time.
    """

    def __init__(self, update: float):
        """`update`: duration of an update, in median lengths."""
        super().__init__()
        self.now, self.update = 0.0, update
        self.free = [0.0] * SLOTS
        self.worked = self.waited = 0.0  # time of all slots at work; of the trainer
        self.ends: dict[int, float] = {}

    def step(self, experience: Any, loss_fn: Any) -> dict[str, float]:
        self.now += self.update
        return super().step(experience, loss_fn)

    def begin(self, groups: Any, *, sampling: Sampling, reward: Any) -> None:
        super().begin(groups, sampling=sampling, reward=reward)
        for group in groups:
            self.ends[group.number] = max(self.completion(seed) for seed in group.seeds)

    def generate(self, prompts: Any, *, seeds: Any, sampling: Sampling, **asked: Any) -> Any:
        """Generates a synchronous step's completions, and waits for the last."""
        self.wait(max(self.completion(seed) for seed in seeds))
        pairs = zip(prompts, seeds, strict=True)
        return [
            rollout_of(prompt, self._completion(prompt, seed, sampling)) for prompt, seed in pairs
        ]

    def completion(self, seed: int) -> float:
        """Assigns a completion to the next free slot and returns when it is finished."""
        end = max(heapq.heappop(self.free), self.now) + length(seed)
        heapq.heappush(self.free, end)
        self.worked += length(seed)
        return end

    def wait(self, until: float) -> None:
        self.waited += max(until - self.now, 0.0)
        self.now = max(until, self.now)

    def take(self, most: int) -> TakenGroups:
        first = sorted(self.under, key=self.ends.__getitem__)[:most]
        return self.take_these(first)

    def take_these(self, numbers: Any) -> TakenGroups:
        self.wait(max(self.ends[number] for number in numbers))
        return super().take_these(numbers)

    def join(self) -> None:
        if self.under:
            self.wait(max(self.ends[number] for number in self.under))

    def ended(self) -> dict[int, list[Rollout]]:
        return {
            number: self.completions[number]
            for number in self.under
            if self.ends[number] <= self.now
        }


def against_synchronous(folder: Path) -> dict[str, float]:
    """Returns the speedup of each schedule over synchronous steps, and idle times; an update takes
    half as long as a synchronous rollout.
    """
    probe = Clocked(update=0.0)
    made(probe, _synchronous).fit(STEPS)
    update = probe.now / STEPS / 2
    schedules = {"one ahead": OneAhead} | {
        f"staleness {most}": _asynchronous(most) for most in (1, 2, 4, 8)
    }
    found: dict[str, float] = {}
    plain = 0.0
    for name, schedule in ({"synchronous": _synchronous} | schedules).items():
        policy = Clocked(update)
        run = made(policy, schedule).fit(STEPS)
        plain = plain or policy.now
        found[f"{name}: times as fast"] = plain / policy.now
        found[f"{name}: trainer idle"] = policy.waited / policy.now
        found[f"{name}: engine idle"] = 1 - policy.worked / (SLOTS * policy.now)
        if name in schedules:
            metrics = run.trained.metrics
            found[f"{name}: staleness"] = sum(row["staleness"] for row in metrics) / len(metrics)
            dropped = sum(row.get("groups_dropped", 0.0) for row in metrics)
            found[f"{name}: dropped"] = dropped / (dropped + STEPS * BATCH)
    return found


def _synchronous(stream: Any, journal: Any) -> Any:
    return Synchronous()


def _asynchronous(most: int) -> Any:
    return lambda stream, journal: Asynchronous(stream, journal, max_staleness=most)
