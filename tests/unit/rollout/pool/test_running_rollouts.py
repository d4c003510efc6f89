"""Environments beside one engine: every rollout is what it would be alone, however they interleave."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rftmega.config import RolloutConfig
from rftmega.core.errors import ContextTooLong, EnvironmentFailed, InfrastructureFault
from rftmega.core.interfaces import Model
from rftmega.core.types import Completion, Prompt, Rollout, Sampling, Trajectory
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.rollout.engines import Engine, ScriptedEngine
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.rollout.pool.pending_requests import PendingRequests, Tasks
from rftmega.rollout.pool.request_queues import Counted, Dealt
from rftmega.rollout.pool.reward_workers import RewardWorkers
from rftmega.rollout.requests.order import RequestOrder
from tests.tiny_models import save_tiny
from tests.two_turns import TwoTurns, expected

PROMPTS = [Prompt((5, 9, 2 + place % 3), index=place) for place in range(9)]
SEEDS = [700 + place for place in range(9)]


def scripted(slots: int = 3) -> ScriptedEngine:
    engine = ScriptedEngine(
        RolloutConfig(max_response_tokens=12, max_batch=slots), vocabulary=30, stop_ids=[1]
    )
    engine.load_weights([], version=4)
    return engine


def rollouts_of(
    engine: Engine, environment: Any, stop: Any = lambda: False, loop: Any = None
) -> list[Rollout]:
    tasks = Tasks(PROMPTS, SEEDS, [1.0] * len(PROMPTS), Sampling(1.0))
    queue = Dealt(RequestOrder([list(range(len(PROMPTS)))], []), 0, slots=engine.slots)
    with PendingRequests(engine, tasks, queue, environment, None, loop=loop) as pending:
        pending.go_on(stop)
        found = pending.judging.scored()
    return [found[place] for place in sorted(found)]


def alone(engine: Engine) -> list[Trajectory]:
    def completion(ids: Sequence[int], seed: int) -> Any:
        return engine.generate([Prompt(tuple(ids))], seeds=[seed], sampling=Sampling(1.0))[0]

    return expected(PROMPTS, SEEDS, completion)


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_rollouts_of_two_turns_are_those_of_a_model_asked_one_at_a_time(seconds: float) -> None:
    engine = scripted()
    rightly = alone(engine)
    found = rollouts_of(engine, TwoTurns(seconds))
    assert [rollout.trajectories for rollout in found] == [(each,) for each in rightly]
    (one,) = found[0].trajectories
    first = engine.generate(PROMPTS[:1], seeds=SEEDS[:1], sampling=Sampling(1.0))[0]
    begin = 3 + len(first.token_ids)
    assert one.loss_mask.tolist()[:3] == [False] * 3
    assert one.loss_mask.tolist()[begin : begin + 2] == [False, False]
    assert one.loss_mask.sum() == len(one) - 5
    assert one.logprobs[~one.loss_mask].tolist() == [0.0] * 5
    assert set(one.versions[one.loss_mask].tolist()) == {4}


def test_so_are_those_of_a_model_whose_second_answer_depends_on_the_first(tmp_path: Path) -> None:
    engine = TransformersEngine(
        save_tiny(tmp_path, "qwen3"),
        RolloutConfig(max_response_tokens=5),
        stop_ids=[1],
        where=torch.device("cpu"),
    )
    engine.version = 4
    rightly = alone(engine)
    found = rollouts_of(engine, TwoTurns())
    assert [rollout.trajectories for rollout in found] == [(each,) for each in rightly]


def test_the_engine_works_for_the_others_while_one_waits_for_its_tool() -> None:
    """With room for one answer at a time, and tools that take a second in all."""
    engine = scripted(slots=1)
    begin = time.monotonic()
    assert len(rollouts_of(engine, TwoTurns(0.2))) == 9
    assert time.monotonic() - begin < 9 * 0.2, "one tool after another"


def test_a_rollout_of_one_turn_takes_no_step_more_than_the_engine_alone() -> None:
    engine, plain = scripted(), scripted()
    plain.generate(PROMPTS, seeds=SEEDS, sampling=Sampling(1.0))
    found = rollouts_of(engine, SingleTurnEnvironment())
    assert engine.steps == plain.steps
    again = plain.generate(PROMPTS, seeds=SEEDS, sampling=Sampling(1.0))
    assert [rollout.response_ids for rollout in found] == [list(each.token_ids) for each in again]


class Watches:
    """Task 0 asks once, for what is long; task 1 twice, with a tool between. The others end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        if task.index > 1:
            return [Trajectory.of(task.token_ids)]
        first = await model.generate(task.token_ids)
        self.seen.append(f"{task.index} has an answer")
        if task.index == 1:
            await asyncio.sleep(0.02)
            self.seen.append("1 has asked again")
            await model.generate(task.token_ids)
        return [Trajectory.of(task.token_ids, first)]


def test_a_tool_that_is_through_is_noticed_while_the_engine_is_busy_with_others() -> None:
    class Paced(ScriptedEngine):
        def _completion(self, seed: int) -> Completion:
            length = 60 if seed == SEEDS[0] else 2
            return Completion((7,) * length, (-0.5,) * length, "stop", 4)

    engine = Paced(RolloutConfig(max_batch=3), vocabulary=30, stop_ids=[1])
    engine.load_weights([], version=4)
    watches = Watches()
    rollouts_of(engine, watches, stop=lambda: bool(time.sleep(0.001)))
    assert watches.seen == ["1 has an answer", "1 has asked again", "0 has an answer"]


class Impatient:
    """Asks again where an answer takes too long."""

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        with suppress(TimeoutError):
            await asyncio.wait_for(model.generate(task.token_ids), 0.001)
        return [Trajectory.of(task.token_ids, await model.generate(task.token_ids))]


def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    engine = scripted(slots=20)
    found = rollouts_of(engine, Impatient(), stop=lambda: bool(time.sleep(0.002)))
    assert len(found) == 9


class Odd(BaseException):
    """Odd is no Exception, as what pytest.fail raises is none."""


class Raises:
    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        await model.generate(task.token_ids)
        raise Odd


def test_an_environment_that_raises_no_exception_is_named_as_well() -> None:
    with pytest.raises(EnvironmentFailed, match="Raises failed with Odd"):
        rollouts_of(scripted(), Raises())


class Exits:
    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        await model.generate(task.token_ids)
        raise SystemExit(3)


def test_an_environment_that_ends_its_program_is_named_and_ends_nothing() -> None:
    with pytest.raises(EnvironmentFailed, match=r"Exits failed with SystemExit\(3\)"):
        rollouts_of(scripted(), Exits())


class Cancels:
    """Is cancelled by a tool of its own."""

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        await model.generate(task.token_ids)
        raise asyncio.CancelledError("the tool's own")


def test_a_rollout_that_is_cancelled_from_inside_does_not_wait_for_ever() -> None:
    with pytest.raises(EnvironmentFailed, match="Cancels failed with CancelledError"):
        rollouts_of(scripted(), Cancels())


class Breaks:
    """Fails in the sixth task, once it has an answer."""

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        completion = await model.generate(task.token_ids)
        if task.index == 5:
            raise KeyError("no such tool")
        return [Trajectory.of(task.token_ids, completion)]


def test_an_environment_that_fails_is_named_with_its_prompt() -> None:
    with pytest.raises(
        EnvironmentFailed, match=r"Breaks failed with KeyError\('no such tool'\).* of prompt 5\."
    ):
        rollouts_of(scripted(), Breaks())


class Empty:
    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        return []


def test_an_environment_that_returns_nothing_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match="Empty failed with .*it returned no trajectory"):
        rollouts_of(scripted(), Empty())


class Wrong:
    """Returns something that can't be learnt from."""

    def __init__(self, found: Any):
        self.found = found

    async def run(self, task: Prompt, model: Model) -> Sequence[Any]:
        return [self.found]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (((1, 2), (3,)), "tuple in place of a Trajectory"),
        (Trajectory.of((), Completion((1, 2), (), "stop", 0)), "begins with no prompt"),
        (Trajectory.of((1,)), "has nothing behind it"),
        (Trajectory.of((1,) * 2000), "has 2000 tokens: .* Leave out what stands behind"),
    ],
)
def test_what_can_not_be_trained_from_is_refused_with_its_prompt(found: Any, told: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"{told}.* of prompt"):
        rollouts_of(scripted(), Wrong(found))


class StartsSlowly:
    """Waits before it asks, and notes how many do so at a time."""

    now = most = 0

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        StartsSlowly.now += 1
        StartsSlowly.most = max(StartsSlowly.most, StartsSlowly.now)
        await asyncio.sleep(0.002)
        completion = await model.generate([*map(np.int64, task.token_ids)])
        StartsSlowly.now -= 1
        return [Trajectory.of(task.token_ids, completion)]


def test_rollouts_that_wait_before_they_ask_are_not_all_begun_at_once() -> None:
    engine = scripted(slots=1)
    tasks = Tasks(PROMPTS, SEEDS, [1.0] * len(PROMPTS), Sampling(1.0))
    order = RequestOrder([[0]], [[place] for place in range(1, 9)])
    queue = Counted(order, 0, board=dist.HashStore(), name="count")
    with PendingRequests(engine, tasks, queue, StartsSlowly(), None) as pending:
        assert pending.go_on()
        assert len(pending.judging.scored()) == 9
    assert StartsSlowly.most == 2


class Locked:
    """Holds something that belongs to an event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Semaphore(2)

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        async with self.lock:
            return [Trajectory.of(task.token_ids, await model.generate(task.token_ids))]


def test_what_an_environment_holds_serves_the_next_generation_as_well() -> None:
    environment, loop = Locked(), asyncio.new_event_loop()
    for _ in range(2):
        assert len(rollouts_of(scripted(), environment, loop=loop)) == 9


class Talks:
    """Goes on until there is no room."""

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        said: list[Any] = [task.token_ids]
        context = [*task.token_ids]
        while len(context) < 17:
            said.append(await model.generate(context))
            context += said[-1].token_ids
        with pytest.raises(ContextTooLong, match="no room for a completion: .* is 17"):
            await model.generate(context)
        return [Trajectory.of(*said)]


def test_a_context_that_is_full_is_told_to_the_environment_and_no_row_is_longer(
    tmp_path: Path,
) -> None:
    engine = TransformersEngine(
        save_tiny(tmp_path, "qwen3"),
        RolloutConfig(max_prompt_tokens=5, max_response_tokens=12),
        stop_ids=range(0, 100, 3),
        where=torch.device("cpu"),
    )
    engine.version = 4
    lengths = {len(rollout.trajectories[0]) for rollout in rollouts_of(engine, Talks())}
    assert lengths == {17}


class Unwinds:
    """Notes what it was told at its end."""

    ended = 0

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        try:
            completion = await model.generate(task.token_ids)
            await asyncio.sleep(60)
        finally:
            Unwinds.ended += 1
        return [Trajectory.of(task.token_ids, completion)]


def test_rollouts_that_are_stopped_clean_up_behind_them() -> None:
    engine = scripted(slots=20)
    steps = iter(range(100))
    assert rollouts_of(engine, Unwinds(), stop=lambda: next(steps) == 5) == []
    assert Unwinds.ended == len(PROMPTS)


class Faulty:
    """Fails by somebody else's fault in the first so many runs of each task, after one answer."""

    def __init__(self, faults: int):
        self.faults = faults
        self.runs = dict.fromkeys(range(len(PROMPTS)), 0)

    async def run(self, task: Prompt, model: Model) -> Rollout:
        first = await model.generate(task.token_ids)
        self.runs[task.index] += 1
        if self.runs[task.index] <= self.faults and task.index % 2:
            raise InfrastructureFault("the search server is gone")
        return Rollout((Trajectory.of(task.token_ids, first),), rewards={"own": 2.0})


def repeated(environment: Any, repeats: int) -> list[Rollout]:
    engine = scripted()
    tasks = Tasks(PROMPTS, SEEDS, [1.0] * len(PROMPTS), Sampling(1.0))
    queue = Dealt(RequestOrder([list(range(len(PROMPTS)))], []), 0, slots=engine.slots)
    with PendingRequests(engine, tasks, queue, environment, None, repeats=repeats) as pending:
        pending.go_on()
        found = pending.judging.scored()
    return [found[place] for place in sorted(found)]


def test_a_rollout_is_run_again_with_the_same_seeds_after_a_fault_that_is_not_the_policys() -> None:
    found = repeated(Faulty(2), repeats=2)
    undisturbed = repeated(Faulty(0), repeats=0)
    assert [each.trajectories for each in found] == [each.trajectories for each in undisturbed]
    assert [each.measures.get("repeats", 0) for each in found] == [0, 2] * 4 + [0]
    assert all(each.rewards == {"own": 2.0} and not each.lost for each in found)


def test_a_rollout_is_left_out_where_running_it_again_does_not_help() -> None:
    found = repeated(Faulty(3), repeats=2)
    assert [bool(each.lost) for each in found] == [False, True] * 4 + [False]
    assert found[1].lost == "the search server is gone"


def test_nobody_scores_what_was_left_out() -> None:
    told: list[str] = []

    def reward(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        told.extend(rollout.lost for rollout in rollouts)
        return [{"reward": 1.0}] * len(rollouts)

    with RewardWorkers(reward, PROMPTS) as workers:
        lost = Rollout((Trajectory.of((1, 2)),), lost="gone")
        kept = Rollout((Trajectory.of((1, 2), Completion((3,), (0.0,), "stop", 0)),))
        workers.finished([0, 1, 2], [lost, kept, lost])
        workers.finished([3], [lost])
        found = workers.scored()
    assert told == [""]
    assert {place: rollout.scores for place, rollout in found.items()} == {
        0: {},
        1: {"reward": 1.0},
        2: {},
        3: {},
    }


class Rewritten:
    """Two trajectories: the second begins with another context."""

    async def run(self, task: Prompt, model: Model) -> list[Trajectory]:
        first = await model.generate(task.token_ids, max_tokens=2)
        second = await model.generate((9, 9), max_tokens=1)
        return [Trajectory.of(task.token_ids, first), Trajectory.of((9, 9), second)]


def test_a_rollout_may_have_several_trajectories_and_answers_no_longer_than_was_asked_for() -> None:
    for rollout in rollouts_of(scripted(), Rewritten()):
        first, second = rollout.trajectories
        assert int(first.loss_mask.sum()) <= 2
        assert second.loss_mask.tolist() == [False, False, True]
        assert rollout.chosen_tokens == int(first.loss_mask.sum()) + 1
    lengths = [int(each.trajectories[0].loss_mask.sum()) for each in rollouts_of(scripted(), Rewritten())]  # fmt: skip
    assert max(lengths) == 2, "no seed gives an answer that is cut off: take others"


def test_more_rollouts_than_places_are_under_way_while_they_wait_for_tools() -> None:
    class Slow:
        running = most = 0

        async def run(self, task: Prompt, model: Model) -> list[Trajectory]:
            Slow.running += 1
            Slow.most = max(Slow.most, Slow.running)
            completion = await model.generate(task.token_ids)
            await asyncio.sleep(0.05)
            Slow.running -= 1
            return [Trajectory.of(task.token_ids, completion)]

    rollouts_of(scripted(slots=1), Slow())
    assert Slow.most > 2
    Slow.most = 0
    engine = scripted(slots=1)
    tasks = Tasks(PROMPTS, SEEDS, [1.0] * len(PROMPTS), Sampling(1.0))
    queue = Dealt(RequestOrder([list(range(len(PROMPTS)))], []), 0, slots=engine.slots)
    with PendingRequests(engine, tasks, queue, Slow(), None, most_running=2) as pending:
        pending.go_on()
    assert Slow.most == 2
