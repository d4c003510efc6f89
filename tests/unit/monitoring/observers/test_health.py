"""Runs that learn nothing say so: no gradient is finite, or no rewards differ."""

import logging
from types import SimpleNamespace

import pytest
import torch

from rftmega.core.errors import Diverged, RewardError
from rftmega.monitoring.observers.health import Divergence, MixedGroups, UndecidedLimit

TAKEN = {"optimizer_steps": 1.0, "skipped_steps": 1.0}
SKIPPED = {"optimizer_steps": 0.0, "skipped_steps": 2.0}
FROZEN: dict[str, float] = {}


def told(steps: list[dict[str, float]], *, limit: int) -> int:
    """The step, counted from 1, in which the run ends; 0: it doesn't."""
    watch = Divergence(limit)
    for step, metrics in enumerate(steps, 1):
        try:
            watch.on_step(SimpleNamespace(step=step), metrics)
        except Diverged:
            return step
    return 0


def test_a_run_ends_after_so_many_steps_without_an_optimizer_step_in_a_row() -> None:
    assert told([SKIPPED, SKIPPED], limit=2) == 2
    assert told([SKIPPED, TAKEN, SKIPPED, TAKEN], limit=2) == 0, (
        "one optimizer step taken is enough"
    )
    assert told([SKIPPED, FROZEN, SKIPPED], limit=2) == 3, (
        "a step in which the policy is frozen says nothing"
    )
    critic = [
        {f"critic_{name}": value for name, value in step.items()} for step in (SKIPPED, SKIPPED)
    ]
    assert told([TAKEN | step for step in critic], limit=2) == 2, (
        "a critic that learns nothing as well"
    )
    assert Diverged.exit_code not in (0, 1, 2, 75), "a code of its own"


class Rollout(SimpleNamespace):
    """Groups of two."""

    def __len__(self) -> int:
        return len(self.reward)


def warnings(
    caplog: pytest.LogCaptureFixture, steps: list[list[float]], *, compares_groups: bool
) -> int:
    watch = MixedGroups(compares_groups=compares_groups)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for rewards in steps:
            rollout = Rollout(reward=torch.tensor(rewards), group=torch.arange(len(rewards)) // 2)
            watch.on_experience(None, rollout, None)
    return len(caplog.records)


def test_rewards_without_spread_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    agree, differ = [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    assert warnings(caplog, [agree] * 2, compares_groups=True) == 0
    assert warnings(caplog, [agree] * 9, compares_groups=True) == 1
    assert "completions of each prompt score alike" in caplog.messages[0]
    assert "mean reward 0.5" in caplog.messages[0]
    assert warnings(caplog, [agree, agree, differ, agree, agree], compares_groups=True) == 0
    assert warnings(caplog, [agree] * 5, compares_groups=False) == 0, (
        "prompts are compared with each other"
    )
    assert warnings(caplog, [[0.5] * 4] * 5, compares_groups=False) == 1


def test_a_part_of_the_reward_that_could_not_be_found_out_for_most_answers_ends_the_run() -> None:
    watch, trainer = UndecidedLimit(), SimpleNamespace(step=4)
    watch.on_step(
        trainer, {"reward_math": 0.1, "reward_math_undecided": 0.5, "reward_code_undecided": 0.0}
    )
    with pytest.raises(
        RewardError,
        match=r"reward.math could not tell whether 60% of the completions of step 4 are right",
    ):
        watch.on_step(trainer, {"reward_math_undecided": 0.6})
