"""Completions of a data set that teachers train on beside the policy's own."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftmega.config import AlgorithmConfig
from rftmega.config.options.teachers import Teacher
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience
from rftmega.data.sampler import PromptOrder
from rftmega.data.supervised import Example, rows_of
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.experience.teachers import AskedTeacher
from rftmega.trainer.given_completions import GivenCompletions
from tests.unit.trainer.experience.test_replayed_teachers import POLICY, TEACHER, Moving
from tests.unit.trainer.experience.test_teachers import ADVANTAGE, LOSS, samples

EXAMPLES = [Example((7, 8), tuple(range(2, 4 + number))) for number in range(6)]


class Scored(Moving):
    def reference_log_probs(self, rows: Any) -> Any:
        found = self.log_probs(rows)
        return replace(found, logp=found.logp.with_values(found.logp.flat - 1))


def order() -> PromptOrder[Example]:
    return PromptOrder(EXAMPLES, batch_size=2, seed="0/ptx", collate=rows_of)


def mixer(*chosen: Teacher) -> GivenCompletions:
    policy: Any = Scored(POLICY)
    asked = [
        AskedTeacher(number, f"t{number}", each, Moving(TEACHER))
        for number, each in enumerate(chosen)
    ]
    return GivenCompletions(policy, order(), asked, OneProcess())


def sampled(teachers: list[AskedTeacher]) -> Experience[Ragged]:
    maker = ExperienceMaker(Scored(POLICY), AlgorithmConfig(), host=OneProcess())  # type: ignore[arg-type]
    maker.teachers = teachers
    given = samples((), (), (), (), reward=[1.0, 0.0, 0.5, 2.0])
    mask = given.rows.mask
    versions = mask.with_values(torch.where(mask.flat, 3, -1))
    made = maker.make(replace(given, versions=versions))
    zero = made.mask.with_values(torch.zeros(len(made.mask.flat)))
    return replace(made, reference_logp=zero, old_value=zero, returns=zero)


def test_teachers_in_the_loss_teach_the_completions_of_the_data_set_too() -> None:
    mix = mixer(LOSS, ADVANTAGE)
    own = sampled(mix.teachers)
    mixed, metrics = mix.beside(own, 3)
    assert metrics == {"given_completions": 2.0}
    assert len(mixed) == 6
    (scores,) = mixed.teachers  # of the teacher in the loss
    assert scores.taught.all()
    # told apart by their reference: the policy's log-prob less 1, here 0 for sampled ones
    assert mixed.reference_logp is not None and mixed.old_logp is not None
    given = [row for row in range(6) if bool((mixed.reference_logp[row] != 0).any())]
    assert given == [1, 4], "every mini-batch gets its share"
    for row in given:
        ids = mixed.tokens[row].tolist()
        example = next(each for each in EXAMPLES if ids == [*each.prompt_ids, *each.response_ids])
        mask = mixed.mask[row]
        assert mask.tolist() == [False, *[True] * len(example.response_ids)]
        policy = torch.tensor([POLICY[0](token) for token in ids[1:]])
        told = torch.tensor([TEACHER[0](token) for token in ids[1:]])
        for column in (mixed.old_logp, mixed.behaviour_logp):
            torch.testing.assert_close(column[row], policy)
        torch.testing.assert_close(mixed.reference_logp[row], policy - 1)
        torch.testing.assert_close(mixed.teacher_logp["t0"][row][mask], told[mask])
        assert mixed.teacher_logp["t1"][row].isnan().all()
        assert not mixed.advantage[row].any()
        assert mixed.versions is not None
        assert mixed.versions[row].tolist() == [3 if own else -1 for own in mask.tolist()]
        assert mixed.old_value is not None and not mixed.old_value[row].any()
    assert mixed.share is not None and mixed.leads is not None
    assert mixed.share[given].tolist() == [1, 1]
    assert mixed.leads[given].all()
    rollouts = mixed.rollouts
    assert len(rollouts.sizes) == len(own.rollouts.sizes) + 2


def test_a_teacher_whose_prompts_are_kept_has_none_for_the_completions_of_the_data_set() -> None:
    """Replay keeps the teachers' prompts of sampled rows."""
    mix = mixer(replace(ADVANTAGE, prompt="hint"))
    own = sampled([])
    prompts = {"t0": Ragged.of([torch.tensor([5, 6], dtype=torch.int32)] * len(own))}
    logp = {"t0": own.mask.with_values(torch.zeros(len(own.mask.flat)))}
    mixed, _ = mix.beside(replace(own, teacher_prompts=prompts, teacher_logp=logp), 0)
    found = [row.tolist() for row in mixed.teacher_prompts["t0"]]
    assert found == [[5, 6], [], [5, 6], [5, 6], [], [5, 6]]


def test_the_update_takes_the_routes_that_the_log_probs_were_computed_with() -> None:
    mix = mixer(LOSS)

    def routed(rows: Any) -> Any:
        routes = rows.tokens.shifted(1).flat[:, None, None].to(torch.uint8)
        stats = Scored(POLICY).log_probs(rows)
        return replace(stats, routes=stats.logp.with_values(routes))

    mix.policy.log_probs = routed  # type: ignore[method-assign]
    own = sampled(mix.teachers)
    routes = own.mask.with_values(torch.full((len(own.mask.flat), 1, 1), 99, dtype=torch.uint8))
    mixed, _ = mix.beside(replace(own, routes=routes), 0)
    assert mixed.routes is not None
    for row in range(len(mixed)):
        expected = mixed.tokens[row][1:].tolist() if row in (1, 4) else [99] * len(mixed.mask[row])
        assert mixed.routes[row].flatten().tolist() == expected


@pytest.mark.parametrize(
    ("steps", "within"), [(0, False), (1, False), (3, False), (0, True), (2, True)]
)
def test_a_resume_within_a_step_has_the_same_completions_again(steps: int, within: bool) -> None:
    def drawn(mix: GivenCompletions, step: int) -> list[int]:
        return mix._rows(step).lengths.tolist()

    whole = mixer(LOSS)
    wanted = [drawn(whole, step) for step in range(steps + 3)]
    first = mixer(LOSS)
    found = [drawn(first, step) for step in range(steps)]
    if within:
        drawn(first, steps)  # the run ends before this step does
    resumed = mixer(LOSS)
    resumed.load_state(first.state())
    assert found + [drawn(resumed, step) for step in range(steps, steps + 3)] == wanted


@pytest.mark.parametrize(
    ("share", "samples_of_a_prompt", "given"),
    [(1.0, 8, 0), (0.5, 8, 32), (0.8, 4, 4), (0.99, 1, 1)],
)
def test_the_data_set_gives_the_rest_of_a_steps_completions(
    share: float, samples_of_a_prompt: int, given: int
) -> None:
    from rftmega.config import RunConfig

    config = RunConfig()
    config.trainer.prompts_per_step = 4
    config.rollout.samples_per_prompt = samples_of_a_prompt
    config.algorithm.on_policy_share = share
    assert config.given_completions == given
    whole = 4 * samples_of_a_prompt + given
    assert math.isclose(given / whole, 1 - share, abs_tol=1 / whole)
