"""Rollouts of two turns over several engines, of one process each or two: those of one engine that
is asked one request at a time, also where an engine breaks down or there is enough early.
"""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineFault
from rftmega.core.sampling_seeds import turn_seed
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.engine_pool import EnginePool, ServerPool
from rftmega.rollout.servers import server as server_module
from rftmega.rollout.servers.server import Server
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.runtime.parallel.process_group import World
from tests.distributed.test_early_stop import NoTurns
from tests.distributed.test_engine_faults import Pushes
from tests.ranks import run_ranks
from tests.rollouts import NEVER, Wrapped, save_scripted
from tests.two_turns import TwoTurns, expected

PROMPTS = [Prompt((5, 9 + place % 4), index=place) for place in range(20)]
SEEDS = [3000 + place for place in range(20)]


class Paced(ScriptedEngine):
    """Answers with what it was asked, in steps of a pace of its own; in step `breaks` it breaks down."""

    def __init__(self, pace: random.Random, breaks: int = 0):
        super().__init__(
            RolloutConfig(max_response_tokens=40, max_batch=3), vocabulary=50, stop_ids=[3]
        )
        self.pace, self.breaks, self.asked = pace, breaks, list[tuple[int, ...]]()

    def _serve(self, requests: Any, sampling: Sampling) -> None:
        def stepped() -> bool:
            time.sleep(0.0005 * self.pace.random())
            if self.steps == self.breaks:
                raise EngineFault("out of pages")
            return bool(requests.stopped())

        noted = Wrapped(requests, stopped=stepped)

        def taken(room: int) -> Any:
            found = requests.take(room)
            self.asked += [tuple(request.token_ids) for request in found]
            return found

        noted.take = taken
        super()._serve(noted, sampling)


def rightly() -> list[Any]:
    engine = Paced(random.Random(0))
    engine.load_weights([], version=7)

    def completion(ids: Sequence[int], seed: int) -> Completion:
        return engine.generate([Prompt(tuple(ids))], seeds=[seed], sampling=Sampling(1.0))[0]

    return expected(PROMPTS, SEEDS, completion)


def scores(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [
        {"reward": float(prompt.index + sum(rollout.response_ids))}
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]


def body(world: World, per_engine: int, wanted: int, breaks: int) -> Any:
    number, place = divmod(world.rank, per_engine)
    # the first process of the engine some steps after the other
    step = breaks + 3 * (place == 0) if breaks and number == 1 else 0
    engine = Paced(random.Random(world.rank), step)
    weights = Pushes(engine)
    weights.push(version=7)
    pool = EnginePool(
        engine,
        NoTurns({}, offload=False),
        world,
        TwoTurns(0.001),
        processes_per_engine=per_engine,
        restarts=1,
    )
    pool.weights = weights

    def enough(rollouts: Sequence[Rollout | None]) -> bool:
        return sum(rollout is not None for rollout in rollouts) >= wanted

    found = pool.generate(
        PROMPTS,
        seeds=SEEDS,
        sampling=Sampling(1.0),
        reward=scores,
        enough=enough if wanted else None,
    )
    return found, engine.asked, engine.steps


@pytest.mark.parametrize(
    ("per_engine", "wanted", "breaks"),
    [
        (1, 0, 5),
        (2, 20, 0),
        *(
            pytest.param(per_engine, wanted, breaks, marks=pytest.mark.ranks)
            for per_engine in (1, 2)
            for wanted in (0, 20)
            for breaks in (0, 5)
            if (per_engine, wanted, breaks) not in ((1, 0, 5), (2, 20, 0))
        ),
    ],
)
def test_rollouts_of_two_turns_are_those_of_one_engine(
    per_engine: int, wanted: int, breaks: int
) -> None:
    trajectories = rightly()
    results = run_ranks(4, body, per_engine, wanted, breaks, timeout=60)
    for found, *_ in results:
        assert [rollout.trajectories for rollout in found] == [(each,) for each in trajectories]
        assert [rollout.scores for rollout in found] == scores(PROMPTS, found)
    if not breaks:
        asked = [sorted(asked) for _, asked, _ in results]
        assert asked == [asked[rank - rank % per_engine] for rank in range(4)], (
            "processes of one engine took other requests"
        )
        assert sum(len(each) for each in asked[::per_engine]) == 2 * len(PROMPTS)


@pytest.mark.ranks
@pytest.mark.parametrize("per_engine", [1, 2])
def test_where_there_is_enough_the_engines_stop_together(per_engine: int) -> None:
    trajectories = rightly()
    results = run_ranks(4, body, per_engine, 3, 0, timeout=60)
    found = results[0][0]
    there = [place for place, rollout in enumerate(found) if rollout is not None]
    assert 3 <= len(there) < len(PROMPTS)
    assert [found[place].trajectories for place in there] == [
        (trajectories[place],) for place in there
    ]
    assert all(other == found for other, *_ in results)
    steps = [each for *_, each in results]
    assert steps == [steps[rank - rank % per_engine] for rank in range(4)]


class NotingServers(ServerEngine):
    """Scripted servers in vLLM's place, which note the seeds that they were asked with."""

    folder = Path()

    def _started(self, number: int) -> Server:
        self._arguments = ["--marker", str(self.folder / f"server-{number}"), "--pause", "0.01"]
        return super()._started(number)


def servers_body(world: World, folder: Path) -> Any:
    server_module.PROGRAM = "scripted_server"
    # not as tests.scripted_server: the package imports torch
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    NotingServers.folder = folder
    config = RolloutConfig(servers=2, max_batch=2, deadline_seconds=20.0)
    engine = NotingServers(folder, config, world, dtype="float32", stop_ids=[NEVER], logs=folder)
    if engine.servers:
        engine.expect(["one"])
    weights = Pushes(engine)
    weights.push(version=4)
    pool = ServerPool(
        engine,
        NoTurns({}, offload=False),
        world,
        TwoTurns(0.001),
        processes_per_engine=world.size,
        restarts=0,
    )
    try:
        return pool.generate(PROMPTS, seeds=SEEDS, sampling=Sampling(1.0), reward=scores)
    finally:
        engine.close()


def test_both_turns_of_a_rollout_are_answered_by_one_server(tmp_path: Path) -> None:
    def echoed(ids: Sequence[int], seed: int) -> Completion:
        """As the scripted server does: what it was asked, and the seed."""
        return Completion((*ids, seed), (-0.5,) * (len(ids) + 1), "length", 4)

    trajectories = expected(PROMPTS, SEEDS, echoed)
    save_scripted(tmp_path)
    for found in run_ranks(2, servers_body, tmp_path, timeout=60):
        assert [rollout.trajectories for rollout in found] == [(each,) for each in trajectories]
    asked = [
        set(map(int, (tmp_path / f"server-{number}.answers").read_text().split()))
        for number in range(2)
    ]
    assert all(asked), "a server had nothing to do"
    for seed in SEEDS:
        assert any({seed, turn_seed(seed, 1)} <= seeds for seeds in asked)
