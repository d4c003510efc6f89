"""Groups on colocated engines that go on in the next step: the same on all processes, bounded, and
each token with its own version and log-prob.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.interfaces import RolloutGroup
from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.partial_rollout_pool import PartialRolloutPool
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.process_group import World
from rftmega.trainer.journal import Journal
from rftmega.trainer.rollout_schedules import JournaledStream
from tests.distributed.test_engine_faults import Pushes
from tests.distributed.test_streaming import assert_exact
from tests.layouts import build_actor
from tests.ranks import VLLM, run_ranks
from tests.rollouts import pool_of
from tests.tiny_models import save_tiny

PRELOADED = VLLM

GROUPS = [
    RolloutGroup(number, Prompt((5, 9, 10 + number), index=number, task=number), (7 * number, 7 * number + 1))
    for number in range(12)
]  # fmt: skip
LONGEST = 90


def scored(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": float(sum(rollout.response_ids))} for rollout in rollouts]


def scripted_pool(world: World, slots: int = 6) -> PartialRolloutPool:
    config = RolloutConfig(max_response_tokens=LONGEST, max_batch=slots)
    engine = ScriptedEngine(config, vocabulary=500, stop_ids=[1])
    pool: Any = PartialRolloutPool(
        engine,
        DevicePhases({}, offload=False),
        world,
        SingleTurnEnvironment(),
        processes_per_engine=1,
        restarts=0,
    )
    pool.weights = Pushes(engine)
    return pool  # type: ignore[no-any-return]


def told(rollouts: Sequence[Rollout | None]) -> list[Any]:
    found = []
    for rollout in rollouts:
        assert rollout is not None
        (row,) = rollout.trajectories
        found.append(
            [row.token_ids.tolist(), row.logprobs.tolist(), row.versions.tolist(), rollout.scores]
        )
    return found  # fmt: skip


def of_first(state: Any) -> Any:
    """What the first process has, on all."""
    given = [state]
    dist.broadcast_object_list(given)
    return given[0]


def step_of(pool: PartialRolloutPool, journal: Journal, step: int, groups: Any) -> dict[str, Any]:
    """Takes two groups of those under way and of these."""
    stream = JournaledStream(pool, journal)
    pool.weights.push(version=step)  # type: ignore[union-attr]
    dropped = [group.number for group in stream.drop(step - 2)]
    pool.begin(groups, sampling=Sampling(0.7), reward=scored)
    asked_beside = pool.generate([Prompt((4,))], seeds=[step], sampling=Sampling(0.0))
    taken = stream.take(min(2, len(pool.under_way)))
    return {
        "dropped": dropped,
        "taken": [group.number for group in taken.groups],
        "rollouts": told(taken.rollouts),
        "beside": told(asked_beside)[0][0],
        "under way": sorted(group.number for group in pool.under_way),
    }


def steps_body(world: World, resumed_at: int, within: bool) -> Any:
    """Steps of a run: what is taken and dropped in each. Another pool does step `resumed_at` again,
    with what is known of it if it was stopped `within` it, and goes on from there.
    """
    pool, seen, left = scripted_pool(world), [], list(GROUPS)
    for step in range(5):
        journal = Journal()
        before = of_first(JournaledStream(pool, journal).state())
        new, left = left[: 6 - len(pool.under_way)], left[6 - len(pool.under_way) :]
        seen.append(step_of(pool, journal, step, new))
        if step == resumed_at:
            done = of_first(journal.state()) if within else []
            pool.close()
            pool, again = scripted_pool(world), Journal()
            again.load_state(done)
            begun = JournaledStream(pool, again).load_state(before)
            pool.begin(begun, sampling=Sampling(0.7), reward=scored)
            seen[-1] = step_of(pool, again, step, new)
            assert not again.behind
    pool.join()
    assert pool.take_these([group.number for group in pool.under_way])
    assert not pool.under_way
    pool.close()
    return seen


@pytest.fixture(scope="module")
def whole() -> Any:
    """What two processes saw of steps without a resume."""
    return run_ranks(2, steps_body, -1, False)


def test_groups_go_on_in_the_next_step_and_each_is_taken_or_dropped_once(whole: Any) -> None:
    first, other = whole
    assert first == other, "processes know otherwise"
    (alone,) = run_ranks(1, steps_body, -1, False)
    mixed = 0
    for seen in (first, alone):
        numbers = [number for step in seen for number in (*step["taken"], *step["dropped"])]
        begun = sorted([*numbers, *seen[-1]["under way"]])
        assert begun == list(range(len(begun)))
        for at, step in enumerate(seen):
            for _, _, versions, scores in step["rollouts"]:
                own = versions[3:]
                assert own == sorted(own) and own[0] >= max(0, at - 2) and own[-1] <= at
                assert scores["reward"] > 0
                mixed += len(set(own)) > 1
        # the scripted engine's answer to a seed does not depend on what else it does
        assert [step["beside"] for step in seen] == [step["beside"] for step in alone]
    assert mixed > 3, "nothing went on"


@pytest.mark.parametrize(
    ("resumed_at", "within"),
    [
        (2, False),
        pytest.param(3, False, marks=pytest.mark.ranks),
        (2, True),
        pytest.param(3, True, marks=pytest.mark.ranks),
    ],
)
def test_a_resume_goes_on_from_the_same_tokens(resumed_at: int, within: bool, whole: Any) -> None:
    again, _ = run_ranks(2, steps_body, resumed_at, within)
    assert json.dumps(again) == json.dumps(whole[0])


def limits_body(world: World) -> Any:
    """What another pool takes over of rollouts that were broken off: with the same limits, and with
    shorter answers.
    """
    pool = scripted_pool(world)
    pool.weights.push(version=0)  # type: ignore[union-attr]
    pool.begin(GROUPS, sampling=Sampling(1.0), reward=None)
    pool.take(1)
    state = of_first(pool.unfinished()())
    pool.close()
    taken_over = []
    for longest in (LONGEST, LONGEST // 3):
        pool = scripted_pool(world)
        pool.engine.longest = longest  # type: ignore[attr-defined]
        pool.load_unfinished(state)
        taken_over.append(len(of_first(pool.unfinished()())["partial"]))
        pool.close()
    return taken_over


def test_rollouts_begin_again_where_answers_may_be_shorter_after_a_resume() -> None:
    (same, shorter), other = run_ranks(2, limits_body)
    assert same > 0 == shorter and other == [same, shorter]


def scored_once_body(world: World) -> Any:
    """How often each answer was scored."""
    pool, seen = scripted_pool(world), list[str]()

    def noting(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        seen.extend(str(rollout.trajectories[0].token_ids.tolist()) for rollout in rollouts)
        return [{"reward": 1.0} for _ in rollouts]

    pool.begin(GROUPS, sampling=Sampling(1.0), reward=noting)
    for version in range(6):
        pool.weights.push(version=version)  # type: ignore[union-attr]
        pool.take(2)
    pool.close()
    return seen


def test_each_answer_is_scored_once() -> None:
    seen = [own for theirs in run_ranks(2, scored_once_body) for own in theirs]
    assert len(seen) == len(set(seen)) == 2 * len(GROUPS)


def drop_body(world: World) -> Any:
    """What is dropped as too old, of groups that have tokens and of others that have none."""
    pool = scripted_pool(world, slots=2)
    pool.weights.push(version=0)  # type: ignore[union-attr]
    pool.begin(GROUPS, sampling=Sampling(1.0), reward=None)
    pool.take(1)
    left = [group.number for group in pool.under_way]
    (state, *_) = gather_objects(pool.unfinished()())
    begun = {number for number, _ in [*state["partial"], *state["whole"]]}
    (ended, *_) = gather_objects(sorted(pool.ended()))
    begun |= set(ended)
    pool.weights.push(version=1)  # type: ignore[union-attr]
    dropped = [group.number for group in pool.drop(1)]
    kept = [group.number for group in pool.under_way]
    taken = pool.take(len(kept))
    pool.close()
    versions = {version for rollout in taken.rollouts if rollout for version in rollout.versions}
    return left, sorted(begun), sorted(dropped), kept, versions


def test_groups_with_a_token_that_is_too_old_are_dropped_and_others_are_not() -> None:
    found, other = run_ranks(2, drop_body)
    assert found == other
    left, begun, dropped, kept, versions = found
    assert 0 < len(begun) < len(left) and dropped == begun
    assert sorted([*kept, *dropped]) == sorted(left)
    assert versions == {1}


def two_versions_body(world: World, folder: Path, parallel: ParallelConfig, tensor: int) -> Any:
    """What vLLM in the trainer's processes gives, whose answers were broken off for new weights."""
    from rftmega.rollout.engines.vllm import VLLMEngine

    actor = build_actor(folder, parallel, temperature=0.7, token_cap=512)
    config = RolloutConfig(
        max_prompt_tokens=8,
        max_response_tokens=LONGEST,
        cpu_cache_gib=0.05,
        max_batch=3 * tensor,
        tensor=tensor,
    )
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[])
    phases = DevicePhases({"policy": actor.manager.residency}, offload=False)
    pool: Any = pool_of(
        engine,
        phases,
        world,
        None,
        processes_per_engine=tensor,
        restarts=0,
        kind=PartialRolloutPool,
    )
    weights = pool.weight_sync(actor.manager.shards(), bucket_bytes=100_000)
    sampling = Sampling(0.7)
    try:
        weights.push(version=3)
        groups = [RolloutGroup(each.number, each.prompt, each.seeds[:1]) for each in GROUPS]
        pool.begin(groups, sampling=sampling, reward=None)
        pool.take(6)  # as many as run side by side: the others have begun since
        with torch.no_grad():
            for bound in actor.manager.bound:
                bound.parameter.mul_(1.1)
        weights.push(version=4)
        taken = pool.take(6)
        after = pool.generate([GROUPS[0].prompt], seeds=[3], sampling=sampling)
    finally:
        pool.close()
    return [found[:3] for found in told([*taken.rollouts, *after])]


@pytest.mark.parametrize(
    ("tensor", "parallel"),
    [
        pytest.param(1, {"tensor": 2}, id="two engines"),
        pytest.param(2, {"pipeline": 2}, id="an engine of two", marks=pytest.mark.ranks),
    ],
)
def test_each_token_has_the_version_and_the_log_prob_that_it_was_drawn_under(
    tensor: int, parallel: dict[str, int], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3")
    found, other = run_ranks(2, two_versions_body, folder, ParallelConfig(**parallel), tensor)
    assert found == other
    seen = assert_exact(folder, found, kept=False, length=LONGEST)
    assert 2 in seen, "no answer was broken off"
