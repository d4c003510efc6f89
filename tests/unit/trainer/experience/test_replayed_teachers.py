"""What teachers say of rows of earlier steps."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftmega.config import AlgorithmConfig, KLConfig, RunConfig
from rftmega.config.options.algorithms import NoPolicyLoss, ReplayConfig, TokenImportance
from rftmega.config.options.teachers import Teacher
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.teacher_scores import TeacherRequest, TeacherScores
from rftmega.core.types import Experience, Rows, Samples, Taught, TokenStats
from rftmega.trainer import Algorithm
from rftmega.trainer.experience import ExperienceMaker, ReplayBuffer
from rftmega.trainer.experience.teachers import AskedTeacher
from rftmega.trainer.replay_mixer import ReplayMixer
from tests.unit.trainer.experience.test_teachers import ADVANTAGE, LOSS, OWN, ROWS, samples

# log-probs of a token in the first step and in the second
POLICY = (lambda token: -0.2 * token, lambda token: -0.05 * token - 0.3)
TEACHER = (lambda token: -0.1 * token, lambda token: -0.4 * token)


class Moving:
    """A policy or a teacher that gives a token another log-prob in each step."""

    def __init__(self, of_steps: Any) -> None:
        self.of_steps, self.step = of_steps, 0
        self.asked: list[Rows[Ragged]] = []

    def log_probs(self, rows: Rows[Ragged], **_: Any) -> TokenStats[Ragged]:
        targets = rows.tokens.shifted(1)
        return TokenStats(targets.with_values(self.of_steps[self.step](targets.flat.float())), None)

    def teach(self, rows: Rows[Ragged], request: TeacherRequest) -> TeacherScores:
        self.asked.append(rows)
        logp = self.log_probs(rows).logp.flat[rows.mask.flat]
        packed = Ragged.packed(logp, rows.mask.sums())
        return TeacherScores(torch.ones(len(rows), dtype=torch.bool), packed)


class Run:
    """Two steps on the same completions, of which the second replays those of the first."""

    def __init__(self, chosen: Teacher | None) -> None:
        self.policy, self.teacher = Moving(POLICY), Moving(TEACHER)
        policy: Any = self.policy
        algorithm = AlgorithmConfig(replay=ReplayConfig(max_age=3))
        self.maker = ExperienceMaker(policy, algorithm, host=OneProcess())
        if chosen is not None:
            self.maker.teachers = [AskedTeacher(0, "expert", chosen, self.teacher)]
        self.mixer = ReplayMixer(policy, ReplayBuffer(), max_age=3, teachers=self.maker.teachers)

    def made(self, given: Samples[Ragged]) -> Experience[Ragged]:
        mask = given.rows.mask
        versions = mask.with_values(torch.where(mask.flat, self.policy.step, -1))
        return self.maker.make(replace(given, versions=versions))

    def replayed(self, given: Samples[Ragged]) -> tuple[Experience[Ragged], Experience[Ragged]]:
        """The rows of the second step, fresh and replayed."""
        self.mixer.keep(self.made(given), given.group)
        self.policy.step = self.teacher.step = 1
        mixed, _ = self.mixer.beside(self.made(given), 1)
        assert mixed.versions is not None
        of_rows = torch.tensor([int(row.max()) for row in mixed.versions])
        fresh, earlier = (mixed.select((of_rows == step).nonzero()[:, 0]) for step in (1, 0))
        return fresh, earlier


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_log_ratios_in_an_advantage_are_those_of_the_present_policy(discount: float) -> None:
    given = samples(*[(Taught(),)] * 3, (None,), reward=[1.0, 0.0, 0.5, 2.0])
    of_rewards = Run(None).made(given).advantage
    run = Run(replace(ADVANTAGE, discount=discount))
    fresh, earlier = run.replayed(given)
    again, _ = run.mixer.beside(run.made(given), 1)  # nothing accumulates
    for row, tokens in enumerate(ROWS):
        later, wanted = 0.0, []
        for place in reversed(range(len(tokens) - 1)):
            token, own = tokens[place + 1], 0.0
            if bool(given.rows.mask[row][place]) and row != 3:
                ratio = TEACHER[1](token) - POLICY[1](token)
                later = own = 0.5 * ratio + discount * later
            wanted.append(own + float(of_rewards[row][place]))
        for found in (fresh.advantage[row], earlier.advantage[row], again.advantage[2 * row + 1]):
            assert found.tolist() == pytest.approx(wanted[::-1], abs=1e-6)


def test_a_teacher_in_the_loss_is_asked_again_about_the_rows_that_it_taught() -> None:
    chosen = replace(LOSS, prompt="hint", gate="score")
    gates = [(Taught(OWN, gate),) for gate in (0.6, 0.6, 0.4, 0.4)]
    run = Run(chosen)
    _, earlier = run.replayed(samples(*gates, reward=[1.0, 0.0, 1.0, 0.0]))
    first, _, again = run.teacher.asked
    assert [row.tolist() for row in again.tokens] == [[*OWN, 7, 8, 9], [*OWN, 3, 4]]
    assert [row.tolist() for row in again.mask] == [row.tolist() for row in first.mask]
    assert again.prompt_lengths.tolist() == [3, 3]
    (scores,) = earlier.teachers
    assert scores.taught.tolist() == [True, True, False, False]
    assert scores.logp is not None
    assert [row.tolist() for row in scores.logp] == [
        pytest.approx([-2.8, -3.2, -3.6]), pytest.approx([-1.2, -1.6]), [], [],
    ]  # fmt: skip
    assert earlier.teacher_logp["expert"][1].tolist()[1:] == pytest.approx([-1.2, -1.6])


def test_rows_without_an_advantage_are_kept_if_a_teacher_in_the_loss_teaches_them() -> None:
    run = Run(LOSS)
    _, earlier = run.replayed(samples(*[(Taught(),)] * 2, *[(None,)] * 2))
    assert [row.tolist() for row in earlier.tokens] == ROWS[:2]
    assert all(not group.teachers for group in run.mixer.buffer.groups)


@pytest.mark.parametrize("missing", ["teacher_logp", "teacher_prompts"])
def test_a_teacher_that_came_with_a_resume_does_not_teach_the_rows_of_before(missing: Any) -> None:
    given = samples(*[(Taught(OWN),)] * 4, reward=[1.0, 0.0, 1.0, 0.0])
    run = Run(replace(LOSS, prompt="hint"))
    run.mixer.keep(run.made(given), given.group)
    groups = run.mixer.buffer.groups
    groups.append(replace(groups.popleft(), **{missing: {}}))
    mixed, _ = run.mixer.beside(run.made(given), 0)
    assert sorted(mixed.teachers[0].taught.tolist()) == [False] * 2 + [True] * 6


def test_the_loss_of_a_run_weighs_sampled_divergences() -> None:
    """With the probability of a token under the policy over that when it was sampled, here 1.5."""
    config = RunConfig(
        algorithm=AlgorithmConfig(
            policy_loss=NoPolicyLoss(),
            importance_sampling=TokenImportance(),
            kl=KLConfig(coef=0.0),
            entropy_coef=0.0,
            teachers=[replace(LOSS, weight=2.0), Teacher(path="X", weight=10.0)],
        )
    )
    experience = Run(None).made(samples()).padded()
    assert experience.old_logp is not None
    experience = replace(experience, behaviour_logp=experience.old_logp - math.log(1.5))
    ones = torch.ones(*experience.mask.shape, 2)
    stats = TokenStats(experience.old_logp, None, divergence=ones)
    value = Algorithm(config).policy_loss()(stats, experience).value
    assert value[experience.mask].tolist() == pytest.approx(
        [2.0 * 1.5 + 10.0] * int(experience.mask.sum())
    )
