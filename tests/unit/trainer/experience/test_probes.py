"""Gates of a teacher that is the policy with another prompt, by completions with this prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftmega.config import RunConfig
from rftmega.config.options.environments import Tools
from rftmega.config.options.teachers import Teacher
from rftmega.config.validation.teachers import teachers
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Samples, Taught
from rftmega.trainer.experience.probes import with_probed_gates
from rftmega.trainer.experience.teachers import AskedTeacher
from tests.unit.trainer.experience.test_teachers import OWN, Reciter, samples

HINTED = Teacher(path="self", prompt="hint", vocabulary="top_k", probes=3)


class Prober:
    """Probes of the first prompt have the scores 1, 0 and 0.5; those of further ones 0."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Prompt], list[int]]] = []

    def __call__(
        self, requests: Sequence[Prompt], seeds: Sequence[int], times: int
    ) -> Samples[Ragged]:
        self.asked.append((list(requests), list(seeds)))
        number = len(requests) // times
        scores = torch.tensor([1.0, 0.0, 0.5] + [0.0] * (len(requests) - 3))
        groups = torch.arange(number).repeat_interleave(times)
        kept = torch.ones(len(requests), dtype=torch.bool)
        kept[1] = False  # lost
        found: Any = type("Found", (), {"reward": scores[kept], "group": groups[kept]})
        return found


def given() -> Samples[Ragged]:
    """Two groups of two rows; a third prompt that the teacher does not teach."""
    taught = (None, Taught(OWN))
    made = samples(taught, taught, taught, (None, None), reward=[0.5, 0.5, 0.0, 1.0])
    prompts = [replace(p, task=40 + row // 2) for row, p in enumerate(made.prompts)]
    return replace(made, prompts=prompts, group=torch.tensor([0, 0, 1, 1]))


def test_the_mean_score_of_probes_is_the_gate_of_their_prompt() -> None:
    probe, teacher = Prober(), AskedTeacher(1, "hinted", HINTED, Reciter())
    found, metrics = with_probed_gates(given(), teacher, probe, seed=7)
    ((requests, seeds),) = probe.asked
    assert [request.token_ids for request in requests] == [OWN] * 6
    assert [request.task for request in requests] == [40] * 3 + [41] * 3
    assert all(request.teachers == () for request in requests)
    assert len(set(seeds)) == 6
    gates = [own.teachers[1] for own in found.prompts]
    assert gates == [Taught(OWN, 0.75), Taught(OWN, 0.75), Taught(OWN, 0.0), None]
    assert [own.teachers[0] for own in found.prompts] == [None] * 4
    assert metrics == {"hinted_probed_reward": 0.375}
    # the first group's mean reward is 0.5, the second's as well, above its gate
    scores = teacher.scores(found, found.rows.mask, OneProcess())
    assert scores.taught.tolist() == [True, True, False, False]


def test_probes_have_seeds_of_their_own() -> None:
    probe, teacher = Prober(), AskedTeacher(1, "hinted", HINTED, Reciter())
    for seed in (7, 7, 8):
        with_probed_gates(given(), teacher, probe, seed=seed)
    (_, first), (_, again), (_, other) = probe.asked
    assert first == again
    assert not set(first) & set(other)


def test_where_all_probes_were_lost_nothing_is_taught() -> None:
    def probe(requests: Sequence[Prompt], seeds: Sequence[int], times: int) -> Any:
        nothing = torch.zeros(0)
        return type("Found", (), {"reward": nothing, "group": nothing})

    teacher = AskedTeacher(1, "hinted", HINTED, Reciter())
    found, metrics = with_probed_gates(given(), teacher, probe, seed=7)
    assert not teacher.scores(found, found.rows.mask, OneProcess()).taught.any()
    assert metrics == {"hinted_probed_reward": 0.0}


@pytest.mark.parametrize(
    ("teacher", "change", "reason"),
    [
        (replace(HINTED, path="X"), {}, "probes=3 needs path=self"),
        (replace(HINTED, gate="score"), {}, "probes=3 with gate=score"),
        (HINTED, {"trainer.max_staleness": 1}, "probes=3 needs a synchronous run"),
        (HINTED, {"rollout.ahead": 1}, "probes=3 needs a synchronous run"),
        (HINTED, {"reward.model": 1.0}, "probes=3 with reward or cost models"),
        (HINTED, {"environment": Tools()}, "prompt=hint with environment.type=tools"),
        (HINTED, {}, ""),
    ],
)
def test_probes_are_refused_where_nothing_would_read_them(
    teacher: Teacher, change: dict[str, Any], reason: str
) -> None:
    config = RunConfig()
    for name, value in change.items():
        section, _, option = name.rpartition(".")
        setattr(getattr(config, section) if section else config, option, value)
    config.algorithm.teachers = [teacher]
    said = "\n".join(teachers(config, 1))
    assert reason in said
    assert bool(reason) == bool(said.replace("path=X holds no config.json", "").strip())
