"""Rollouts that are broken off go on from the tokens that are there, whatever has changed since."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftmega.config import RolloutConfig
from rftmega.core.interfaces import Model
from rftmega.core.sampling_seeds import continued_seed, turn_seed
from rftmega.core.types import Completion, Prompt, Rollout, Sampling, Trajectory
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.partial_rollouts import (
    CachedCompletion,
    PartialRollouts,
    digest,
    everywhere,
    packed_partials,
    unpacked_partials,
)
from rftmega.rollout.pool.pending_requests import PendingRequests, Tasks
from rftmega.rollout.pool.request_queues import Dealt
from rftmega.rollout.requests.order import RequestOrder
from rftmega.rollout.requests.partial_completion import PartialCompletion
from rftmega.runtime.parallel.host_memory import HostMemory
from tests.two_turns import TwoTurns

PROMPTS = [Prompt((5, 9, 2 + place), index=place) for place in range(4)]
SEEDS = [700 + place for place in range(4)]
LONGEST = 30


class Counting(ScriptedEngine):
    """Keeps the requests that it was asked."""

    def __init__(self) -> None:
        config = RolloutConfig(max_response_tokens=LONGEST, max_batch=4)
        super().__init__(config, vocabulary=30, stop_ids=[1])
        self.asked: list[Any] = []

    def _cut(self, request: Any) -> Any:
        self.asked.append(request)
        return super()._cut(request)


def run(
    engine: ScriptedEngine, environment: Any, before: Any, steps: int
) -> tuple[dict[int, Rollout], Any]:
    """Rollouts that have ended after so many steps of the engine, and what there is of all."""
    tasks = Tasks(PROMPTS, SEEDS, [1.0] * len(PROMPTS), Sampling(1.0))
    queue = Dealt(RequestOrder([list(range(len(PROMPTS)))], []), 0, slots=engine.slots)
    partials, end = PartialRollouts(before), engine.steps + steps
    with PendingRequests(engine, tasks, queue, environment, None, partials=partials) as pending:
        pending.go_on(lambda: engine.steps >= end)
        return pending.judging.scored(), partials.noted


def loaded(engine: Any, version: int) -> Any:
    engine.load_weights([], version=version)
    return engine


def first_of(engine: Any, seed: int, tokens: int) -> tuple[list[int], list[float]]:
    completion = engine._completion(seed)
    return [*completion.token_ids[:tokens]], [*completion.logprobs[:tokens]]


def test_an_answer_goes_on_from_its_tokens_under_the_weights_of_then() -> None:
    engine = loaded(Counting(), 4)
    ended, noted = run(engine, SingleTurnEnvironment(), {}, 7)
    lengths = [len(engine._completion(seed).token_ids) for seed in SEEDS]
    assert set(ended) == {place for place, length in enumerate(lengths) if length <= 7}
    assert 0 < len(ended) < 4, "nothing was broken off"
    again, _ = run(loaded(engine, 5), SingleTurnEnvironment(), noted, 1000)
    for place, seed in enumerate(SEEDS):
        (row,) = again[place].trajectories
        ids, logprobs = first_of(engine, seed, 7)
        versions = [4] * len(ids)
        if place not in ended:
            more = first_of(engine, continued_seed(seed, 7), LONGEST - 7)
            ids, logprobs = ids + more[0], logprobs + more[1]
            versions += [5] * len(more[0])
        assert row.token_ids[3:].tolist() == ids
        assert row.logprobs[3:].tolist() == pytest.approx(logprobs)
        assert row.versions[3:].tolist() == versions
    asked = [request for request in engine.asked if request.answered]
    assert len(asked) == 4 - len(ended) and len(engine.asked) == 4 + len(asked), "asked again"
    assert all(request.limit(LONGEST) == LONGEST - 7 for request in asked)
    assert all(request.limit(1000) == 1000 - 7 for request in asked)


def test_an_answer_may_be_broken_off_several_times_and_before_it_began() -> None:
    engine = loaded(Counting(), 0)
    found: Any = {}
    known: Any = {}
    for version in range(40):
        found, noted = run(loaded(engine, version), SingleTurnEnvironment(), known, 3)
        known |= noted
        if len(found) == 4:
            break
    for place, seed in enumerate(SEEDS):
        (row,) = found[place].trajectories
        ids: list[int] = []
        while len(ids) < LONGEST and 1 not in ids[-1:]:
            ids += first_of(engine, continued_seed(seed, len(ids)), min(3, LONGEST - len(ids)))[0]
        assert row.token_ids[3:].tolist() == ids
        assert row.versions[3:].tolist() == [at // 3 for at in range(len(ids))]


class Replies:
    """Two turns, with a reply between that is another one in each run, if it `changes`."""

    def __init__(self, *, changes: bool):
        self.changes, self.runs = changes, 0

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        self.runs += self.changes
        reply = (40, 41 + self.runs)
        first = await model.generate(task.token_ids)
        second = await model.generate((*task.token_ids, *first.token_ids, *reply))
        return [Trajectory.of(task.token_ids, first, reply, second)]


@pytest.mark.parametrize("changes", [False, True])
def test_turns_that_are_there_are_not_asked_again_unless_a_tool_replies_otherwise(
    changes: bool,
) -> None:
    engine = loaded(Counting(), 4)
    environment = Replies(changes=changes)
    steps = 2 * LONGEST + 1
    ended, noted = run(engine, environment, {}, steps)
    assert len(ended) == 4, "all have two turns"
    asked = len(engine.asked)
    again, _ = run(loaded(engine, 5), environment, noted, 1000)
    assert len(engine.asked) - asked == (4 if changes else 0)
    for place, seed in enumerate(SEEDS):
        (row,) = again[place].trajectories
        first, second = (engine._completion(turn_seed(seed, turn)) for turn in range(2))
        completions = [*first.token_ids], [*second.token_ids]
        tokens = row.token_ids.tolist()
        reply = tokens[3 + len(completions[0]) :][:2]
        assert tokens == [*PROMPTS[place].token_ids, *completions[0], *reply, *completions[1]]
        assert row.versions[row.loss_mask].tolist() == [4] * len(completions[0]) + [
            4 + changes
        ] * len(completions[1])


def test_partial_rollouts_are_the_same_when_packed() -> None:
    engine = loaded(Counting(), 4)
    _, noted = run(engine, TwoTurns(), {}, 20)
    assert any(len(turns) == 2 for turns in noted.values())
    assert unpacked_partials(packed_partials(noted)) == noted
    assert unpacked_partials(packed_partials({})) == {}


def test_what_an_answer_that_was_broken_off_tells_of_experts_comes_to_every_process() -> None:
    told = torch.tensor([[[1, 2]], [[3, 0]]], dtype=torch.uint8)
    part = replace(PartialCompletion.of(Completion([7], [-1.0], "stop", 3)), routes=told)
    silent = PartialCompletion.of(Completion([8], [-1.0], "stop", 3))
    noted = {4: {0: CachedCompletion(b"x" * 16, part), 1: CachedCompletion(b"y" * 16, silent)}}
    turns = everywhere(noted, HostMemory())[4]
    assert turns == noted[4]
    assert torch.equal(turns[0].completion.routes, told) and turns[1].completion.routes is None  # type: ignore[arg-type]


def test_contexts_that_differ_have_other_digests() -> None:
    contexts = [(1, 2), (2, 1), (1,), (1, 2, 0), (0x0102,)]
    assert len({digest(context) for context in contexts}) == len(contexts)
    assert digest([1, 2]) == digest((1, 2))
