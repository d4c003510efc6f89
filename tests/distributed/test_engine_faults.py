"""Engines that die, hang or fail in the middle of a generation: restarted, and asked only for what
is left.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.errors import EngineFault
from rftmega.core.types import Completion, Metrics, Prompt, Rollout, Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.engine_pool import ServerPool
from rftmega.rollout.servers import server as server_module
from rftmega.rollout.servers.server import Server
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.process_group import World
from rftmega.weights.transports.shared_weights import SharedWeights
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.rollouts import NEVER, Wrapped, pool_of, response_of, save_scripted
from tests.tiny_models import save_tiny

PROMPTS = [Prompt((place,)) for place in range(12)]
SEEDS = [100 + place for place in range(12)]
# what the scripted one says
SCORED_SERVER = [((place, 100 + place), {"reward": 100.0 + 2 * place}) for place in range(12)]


class Pushes:
    """Weights of no bytes."""

    def __init__(self, engine: ServerEngine | ScriptedEngine):
        self.engine, self.versions = engine, list[int]()

    def push(self, *, version: int) -> Metrics:
        self.versions.append(version)
        if isinstance(self.engine, ScriptedEngine):
            self.engine.load_weights([], version=version)
        elif self.engine.servers:
            self.engine.begin()
            self.engine.finish(version)
        self.engine.version = version
        dist.barrier()
        return {}


def scores(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": float(sum(rollout.response_ids))} for rollout in rollouts]


def at_least(number: int, rollouts: Sequence[Rollout | None]) -> bool:
    return sum(rollout is not None for rollout in rollouts) >= number


def told(rollouts: Sequence[Rollout | None]) -> list[Any]:
    return [None if c is None else (response_of(c), c.scores) for c in rollouts]


class FailsInItsLast(ServerEngine):
    """Scripted servers in vLLM's place; the last is struck by `fault` when it has given 3 answers,
    the first time.
    """

    fault, folder = "", Path()

    def _started(self, number: int) -> Server:
        self._arguments = ["--marker", str(self.folder / f"server-{number}")]
        if number == self.config.servers - 1:
            self._arguments += ["--fault", self.fault, "--after", "3"]
        return super()._started(number)


def servers_body(world: World, folder: Path, fault: str, wanted: int, servers: int) -> Any:
    server_module.PROGRAM = "scripted_server"
    # not as tests.scripted_server: the package imports torch
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    FailsInItsLast.fault, FailsInItsLast.folder = fault, folder
    config = RolloutConfig(servers=servers, max_batch=2, deadline_seconds=4.0)
    engine = FailsInItsLast(folder, config, world, dtype="float32", stop_ids=[NEVER], logs=folder)
    if engine.servers:
        engine.expect(["one"])
    weights = Pushes(engine)
    weights.push(version=4)
    turns = DevicePhases({}, offload=False)
    shared = pool_of(
        engine, turns, world, weights, processes_per_engine=world.size, restarts=1, kind=ServerPool
    )
    asked = {"seeds": SEEDS, "sampling": Sampling(1.0), "reward": scores}
    try:
        if wanted:
            found = shared.generate(PROMPTS, enough=partial(at_least, wanted), **asked)
        else:
            found = [*shared.generate(PROMPTS, **asked)]
        answered = {
            number: (folder / f"server-{number}.answers").read_text().split()
            for number in range(servers)
        }
        dist.barrier()
        # it dies while nobody asks it anything: the next push finds out
        for server in engine.servers[:1]:
            server._process.kill()
            server._process.wait()
        weights.push(version=5)
        later = shared.generate(PROMPTS, **asked)
    finally:
        engine.close()
    return (
        told(found),
        answered,
        weights.versions,
        told(later),
        set.union(*(c.versions for c in later)),
    )


@pytest.mark.parametrize(
    ("fault", "wanted", "servers"),
    [
        pytest.param("KILL", 0, 2, marks=pytest.mark.ranks),
        ("STOP", 0, 2),
        pytest.param("KILL", 12, 2, marks=pytest.mark.ranks),
        ("KILL", 0, 1),
    ],
)
def test_what_a_server_that_dies_or_hangs_has_not_answered_is_asked_of_another_or_of_its_next_start(
    fault: str, wanted: int, servers: int, tmp_path: Path
) -> None:
    save_scripted(tmp_path)
    for found, answered, versions, later, under in run_ranks(
        2, servers_body, tmp_path, fault, wanted, servers, timeout=60
    ):
        assert all(
            completion in (None, right)
            for completion, right in zip(found, SCORED_SERVER, strict=True)
        )
        assert sum(completion is not None for completion in found) >= (wanted or 12)
        started_anew = [4] * (servers == 1)
        assert versions == [4, *started_anew, 5], "the other one answers where there is one"
        seeds = [int(seed) for seeds in answered.values() for seed in seeds]
        assert len(seeds) == len(set(seeds)), "an answer was generated twice"
        assert {SEEDS[place] for place in range(12) if found[place]} <= set(seeds)
        assert (later, under) == (SCORED_SERVER, {5})
    assert (tmp_path / f"server-{servers - 1}").exists(), "nothing happened to it"


class Fragile(ScriptedEngine):
    """Breaks down when it has told of two answers, `times` over."""

    def __init__(self, times: int, slots: int = 6):
        super().__init__(
            RolloutConfig(max_response_tokens=60, max_batch=slots), vocabulary=50, stop_ids=[1]
        )
        self.times, self.asked = times, list[list[int]]()

    def _serve(self, requests: Any, sampling: Sampling) -> None:
        self.asked.append([])
        ended = list[int]()

        def telling(numbers: Sequence[int], completions: Sequence[Completion]) -> None:
            requests.finished(numbers, completions)
            ended.extend(numbers)
            if self.times and len(ended) >= 2:
                self.times -= 1
                raise EngineFault("out of pages")

        noted = Wrapped(requests, finished=telling)
        noted.take = partial(noting, self.asked[-1], requests)
        super()._serve(noted, sampling)


def noting(seeds: list[int], requests: Any, room: int) -> Any:
    """Takes requests, and notes their seeds."""
    taken = requests.take(room)
    seeds.extend(request.seed for request in taken)
    return taken


def shared_body(world: World, times: int, wanted: int) -> Any:
    """On the second process the engine is fragile."""
    engine = Fragile(times * world.rank)
    weights = Pushes(engine)
    weights.push(version=7)
    shared = pool_of(
        engine,
        DevicePhases({}, engine=engine, offload=False),
        world,
        weights,
        processes_per_engine=1,
        restarts=2,
    )
    asked = {"seeds": SEEDS, "sampling": Sampling(1.0), "reward": scores}
    try:
        if wanted:
            found = shared.generate(PROMPTS, enough=partial(at_least, wanted), **asked)
        else:
            found = [*shared.generate(PROMPTS, **asked)]
    except EngineFault as fault:
        return str(fault)
    return told(found), engine.asked, weights.versions


@pytest.mark.parametrize("wanted", [0, pytest.param(12, marks=pytest.mark.ranks)])
def test_an_engine_in_the_trainers_process_gets_its_weights_again_and_answers_what_is_left(
    wanted: int,
) -> None:
    (undisturbed, (all_of_it,), _), _ = run_ranks(2, shared_body, 0, 0)[::-1]
    healthy, failing = run_ranks(2, shared_body, 2, wanted)
    assert healthy[0] == failing[0] == undisturbed
    assert healthy[1][1:] == [[], []], "it had given all of its answers"
    first, second, third = failing[1]
    assert first == all_of_it and len(second) <= 4 and len(third) <= 2
    assert set(third) < set(second) < set(first)
    assert healthy[2] == failing[2] == [7, 7, 7]


def test_where_there_is_enough_all_the_same_nothing_is_restarted() -> None:
    for found, asked, versions in run_ranks(2, shared_body, 1, 3):
        assert sum(completion is not None for completion in found) >= 3
        assert len(asked) == 1
        assert versions == [7]


@pytest.mark.parametrize("wanted", [pytest.param(0, marks=pytest.mark.ranks), 13])
def test_an_engine_that_fails_again_and_again_is_named_on_every_process(wanted: int) -> None:
    for said in run_ranks(2, shared_body, 3, wanted):
        assert said == "out of pages (faults.engine_restarts=2 did not help.)"


def real_body(world: World, folder: Path, logs: Path, fault: int) -> Any:
    """Two vLLM servers; the second is struck when a third of the answers are there."""
    actor = build_actor(folder, ParallelConfig(tensor=2), temperature=0.7, token_cap=512)
    config = RolloutConfig(
        servers=2,
        max_prompt_tokens=32,
        max_response_tokens=200,
        cpu_cache_gib=0.05,
        max_batch=2,
        deadline_seconds=60.0,
    )
    engine = ServerEngine(folder, config, world, dtype="float32", stop_ids=[1], logs=logs)
    weights = SharedWeights(actor.manager.shards(), engine, bucket_bytes=10**6)
    weights.push(version=0)
    turns = DevicePhases({}, offload=False)
    shared = pool_of(
        engine, turns, world, weights, processes_per_engine=world.size, restarts=1, kind=ServerPool
    )
    prompts = [Prompt((5, 9, 60 + place)) for place in range(12)]
    asked = list[list[int]]()
    plain = engine._serve

    def noted(requests: Any, sampling: Sampling) -> None:
        asked.append([])
        watched = Wrapped(requests)
        watched.take = partial(noting, asked[-1], requests)
        plain(watched, sampling)

    engine._serve = noted  # type: ignore[method-assign]
    undisturbed = shared.generate(prompts, seeds=SEEDS, sampling=Sampling(0.7))
    seen = list[Rollout]()

    def judged(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        seen.extend(rollouts)
        return [{"reward": 0.0}] * len(rollouts)

    if world.rank == 0:
        victim = engine.servers[1]._process.pid

        def strike() -> None:
            while len(seen) < 4:
                time.sleep(0.005)
            os.killpg(victim, fault)

        threading.Thread(target=strike, daemon=True).start()
    again = shared.generate(prompts, seeds=SEEDS, sampling=Sampling(0.7), reward=judged)
    engine.close()
    return [*map(response_of, undisturbed)], [*map(response_of, again)], asked


@pytest.mark.ranks
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_real_server_that_dies_or_hangs_has_not_answered_another_answers_the_same(
    fault: int, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2-tied", hidden_size=128)
    (undisturbed, again, asked), _ = run_ranks(
        2, real_body, folder, tmp_path / "logs", fault, timeout=600
    )
    assert again == undisturbed
    assert [sorted(seeds) for seeds in asked] == [SEEDS, SEEDS], "each is taken once"
