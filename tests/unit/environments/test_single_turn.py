"""The environment of one turn, and trajectories as they are joined and laid out."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rftmega.config import RunConfig
from rftmega.core.types import Completion, Prompt, Rollout, Trajectory
from rftmega.environments.create import create
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.trainer.experience import collect

FIRST = Completion((4, 5), (-0.1, -0.2), "stop", 3)
SECOND = Completion((8,), (-0.5,), "length", 4)
TWO_TURNS = Trajectory.of((1, 2, 3), FIRST, (6, 7), SECOND)


class Says:
    async def generate(self, token_ids: Sequence[int]) -> Completion:
        assert token_ids == (1, 2, 3)
        return FIRST


def test_it_asks_once() -> None:
    (found,) = asyncio.run(SingleTurnEnvironment().run(Prompt((1, 2, 3)), Says()))
    assert found == Trajectory.of((1, 2, 3), FIRST)
    assert found.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert found.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert not found.truncated


def test_a_run_has_it_where_no_other_is_chosen() -> None:
    assert isinstance(create(RunConfig().environment, None), SingleTurnEnvironment)


def test_segments_are_joined_with_a_hole_where_the_environment_spoke() -> None:
    assert TWO_TURNS.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert TWO_TURNS.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert TWO_TURNS.logprobs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0, -0.5])
    assert TWO_TURNS.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4]
    assert TWO_TURNS.truncated
    assert TWO_TURNS.prompt_length == 3
    rollout = Rollout((TWO_TURNS,))
    assert rollout.response_ids == [4, 5, 6, 7, 8]
    assert rollout.chosen_tokens == 3
    assert rollout.versions == {3, 4}


def scored(prompts: Any, rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": 1.0}] * len(rollouts)


def test_rows_keep_the_hole_when_they_are_laid_out_selected_and_joined() -> None:
    short = Trajectory.of((9,), FIRST)
    prompts = [Prompt((1, 2, 3)), Prompt((9,))]
    rollouts = [Rollout((TWO_TURNS,)), Rollout((short,))]
    samples = collect(prompts, rollouts, scored, samples_per_prompt=1)
    mask = [[0, 0, 1, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert samples.padded().rows.mask.int().tolist() == mask
    assert samples.versions is not None
    assert samples.versions[0].tolist() == [-1, -1, 3, 3, -1, -1, 4]
    assert samples.truncated.tolist() == [True, False]
    joined = type(samples).join([samples.select(samples.group == 1), samples])
    assert joined.padded().rows.mask.int().tolist() == [mask[1], *mask]
    assert joined.rows.with_end().padded().mask.int().tolist() == [
        [*row, 0] for row in [mask[1], *mask]
    ]
