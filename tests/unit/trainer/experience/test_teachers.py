"""What teachers add to a step: rows that they are asked about, advantages, metrics."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.config import AlgorithmConfig
from rftmega.config.options.teachers import Teacher
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import Experience, Prompt, Rows, Samples, Taught, TokenStats
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.experience.teachers import AskedTeacher, log_ratios

ROWS = [[5, 6, 7, 8, 9], [5, 6, 3, 4], [1, 2, 9, 9, 9, 9], [1, 2, 7]]
PROMPT_LENGTHS = [2, 2, 2, 2]
OWN = (11, 12, 13)


class Reciter:
    """A teacher whose log-prob of a token is minus its number over 10, and which keeps what it is
    asked.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Rows[Ragged], TeacherRequest]] = []

    def teach(self, rows: Rows[Ragged], request: TeacherRequest) -> TeacherScores:
        self.asked.append((rows, request))
        targets = rows.tokens.shifted(1).flat
        marked = targets[rows.mask.flat]
        logp = Ragged.packed(-marked.float() / 10, rows.mask.sums())
        return TeacherScores(torch.ones(len(rows), dtype=torch.bool), logp)


class Policy:
    """Its log-probs are -0.5 everywhere."""

    def log_probs(self, rows: Rows[Ragged], **_: Any) -> TokenStats[Ragged]:
        return TokenStats(rows.mask.with_values(torch.full((len(rows.mask.flat),), -0.5)), None)


def samples(
    *teachers: tuple[Taught | None, ...], reward: list[float] | None = None
) -> Samples[Ragged]:
    tokens = Ragged.of([torch.tensor(row, dtype=torch.int32) for row in ROWS])
    lengths, prompts = tokens.lengths, torch.tensor(PROMPT_LENGTHS)
    masks = [
        torch.arange(1, len(row)) >= length
        for row, length in zip(ROWS, PROMPT_LENGTHS, strict=True)
    ]
    masks[2][3] = False  # a token of the environment between two completions
    given = teachers or ((),) * len(ROWS)
    return Samples(
        [Prompt(tuple(row[:2]), teachers=own) for row, own in zip(ROWS, given, strict=True)],
        Rows(tokens, prompts, lengths, Ragged.of(masks)),
        Ragged.of([torch.zeros(len(row) - 1) for row in ROWS]),
        torch.tensor(reward or [0.0] * len(ROWS)),
        torch.tensor([0, 0, 1, 1]),
        torch.zeros(len(ROWS), dtype=torch.bool),
        {},
    )


def made(
    chosen: Teacher, given: Samples[Ragged], **options: Any
) -> tuple[Experience[Ragged], ExperienceMaker, Reciter]:
    teacher = Reciter()
    maker = ExperienceMaker(Policy(), AlgorithmConfig(**options), host=OneProcess())  # type: ignore[arg-type]
    maker.teachers = [AskedTeacher(0, "expert", chosen, teacher)]
    return maker.make(given), maker, teacher


LOSS = Teacher(path="X", vocabulary="sampled")
ADVANTAGE = replace(LOSS, signal="advantage", weight=0.5)


def test_a_teacher_in_the_loss_scores_the_rows_that_it_teaches() -> None:
    math = (Taught(),)
    experience, maker, teacher = made(LOSS, samples(math, (None,), math, (None,)))
    ((rows, request),) = teacher.asked
    assert request == TeacherRequest("sampled", 64)
    assert [row.tolist() for row in rows.tokens] == [ROWS[0], ROWS[2]]
    (scores,) = experience.teachers
    assert scores.taught.tolist() == [True, False, True, False]
    assert scores.logp is not None
    assert [[round(10 * x) for x in row.tolist()] for row in scores.logp] == [
        [-7, -8, -9], [], [-9, -9, -9], [],
    ]  # fmt: skip
    assert maker.measured["expert_rows"] == 0.5
    assert maker.measured["expert_seconds"] >= 0
    chosen = experience.select(torch.tensor([2, 0])).teachers[0]
    assert chosen.taught.tolist() == [True, True]
    assert chosen.logp is not None
    assert [len(row) for row in chosen.logp] == [3, 3]
    again = Experience.join([experience.select(torch.tensor([i])) for i in (3, 2, 1, 0)])
    assert again.teachers[0].taught.tolist() == [False, True, False, True]
    assert not experience.advantage.flat.any()


def test_scores_are_found_by_their_place_among_the_trained_tokens() -> None:
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 1]]).bool()
    scores = TeacherScores(torch.tensor([True, False, True]))
    assert scores.index_of(mask).tolist() == [-1, 0, 1, -1, -1, -1, -1, -1, 2, -1]


def test_a_prompt_of_its_own_replaces_the_policys() -> None:
    chosen = replace(LOSS, prompt="hint")
    own, other = (Taught(OWN),), (None,)
    given = samples(own, other, own, other)
    given.prompts[2] = replace(given.prompts[2], token_ids=(1, 9))  # its context was rewritten
    experience, _, teacher = made(chosen, given)
    ((rows, _),) = teacher.asked
    assert [row.tolist() for row in rows.tokens] == [[*OWN, 7, 8, 9]]
    assert [row.tolist() for row in rows.mask] == [[False, False, True, True, True]]
    assert rows.prompt_lengths.tolist() == [3]
    assert experience.teachers[0].taught.tolist() == [True, False, False, False]


def test_a_gate_is_compared_with_the_mean_reward_of_the_prompt() -> None:
    given = samples(
        *[(Taught(gate=gate),) for gate in (0.6, 0.6, 0.4, 0.4)], reward=[1.0, 0.0, 1.0, 0.0]
    )
    experience, _, _ = made(replace(LOSS, gate="score"), given)
    assert experience.teachers[0].taught.tolist() == [True, True, False, False]


def test_dropped_completions_are_not_taught() -> None:
    given = replace(samples(), truncated=torch.tensor([True, False, False, False]))
    experience, _, teacher = made(LOSS, given, drop_truncated=True)
    assert len(teacher.asked[0][0]) == 3
    assert experience.teachers[0].taught.tolist() == [False, True, True, True]


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_a_teacher_in_the_advantage_adds_discounted_log_ratios(discount: float) -> None:
    chosen = replace(ADVANTAGE, discount=discount)
    experience, _, _ = made(chosen, samples(*[(Taught(),)] * 3, (None,)))
    assert experience.teachers == ()
    of_tokens = [[-7, -8, -9], [-3, -4], [-9, -9, None, -9]]
    for row, logps in enumerate(of_tokens):
        rewards = [None if x is None else 0.5 * (x / 10 + 0.5) for x in logps]
        later = 0.0
        wanted = []
        for reward in reversed(rewards):
            if reward is None:
                wanted.append(0.0)
                continue
            later = reward + discount * later
            wanted.append(later)
        found: Tensor = experience.advantage[row][1:]
        assert found.tolist() == pytest.approx(wanted[::-1], abs=1e-6)
    assert not experience.advantage[3].any()
    ratios = [x for row in of_tokens for x in row if x is not None]
    mean = sum(-0.5 - x / 10 for x in ratios) / len(ratios)
    assert log_ratios(experience) == {"expert_log_ratio": pytest.approx(mean, abs=1e-6)}
    shown = experience.teacher_logp["expert"]
    assert [round(10 * x, 3) for x in shown[0].tolist()[1:]] == of_tokens[0]
    assert shown[3].isnan().all()
