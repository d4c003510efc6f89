"""Measures how long engines are idle at the end of a rollout, by the steps of the scripted engine:
all of them step together; and the overhead of rollouts in an environment.
"""

import math
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.timing import compare
from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.engine_pool import EnginePool
from rftmega.rollout.pool.pending_requests import PendingRequests, Stop, Tasks
from rftmega.rollout.pool.request_queues import Counted
from rftmega.rollout.requests.order import ordered
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.process_group import World
from tests.layouts import build_manager
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

PROMPTS, SIBLINGS, LIMIT, SLOTS = 128, 8, 1024, 8
# standard deviation of the logarithm of the expected length, around the mean length of a prompt's
# completions
GUESS = 1.0
DRAWS = 4


class AsLongAsItsSeed(ScriptedEngine):
    """AsLongAsItsSeed generates n tokens for a request with seed n."""

    def _completion(self, seed: int) -> Completion:
        assert self.version is not None
        return Completion((3,) * seed, (0.0,) * seed, "stop", self.version)


class Clock:
    """Clock runs threads one at a time: the one with the fewest steps, among equal ones
    the first.
    """

    def __init__(self, threads: int):
        self.steps = [0] * threads
        self._turns = [threading.Semaphore(0) for _ in range(threads)]
        self._running = set(range(threads))

    def run(self, work: Callable[[int, Stop], Any]) -> list[Any]:
        """Returns the result of `work` in each thread, by its number.

        `work` calls its stop function, which always returns False, once per step.
        """
        found: list[Any] = [None] * len(self.steps)

        def one(number: int) -> None:
            self._turns[number].acquire()
            try:
                found[number] = work(number, lambda: self._step(number))
            finally:
                self._running.discard(number)
                self._next()

        threads = [
            threading.Thread(target=one, args=(number,)) for number in range(len(self.steps))
        ]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        return found

    def _step(self, number: int) -> bool:
        self.steps[number] += 1
        self._next()
        self._turns[number].acquire()
        return False

    def _next(self) -> None:
        if self._running:
            self._turns[
                min(self._running, key=lambda number: (self.steps[number], number))
            ].release()


def steps_of(
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    expected: Sequence[float],
    engines: int,
    slots: int,
    *,
    dealt_once: bool,
) -> list[int]:
    """Returns the steps until each engine is idle.

    With `dealt_once` all requests are assigned to engines from the beginning.
    """
    order, board = (
        ordered(prompts, expected, engines, len(prompts) if dealt_once else slots),
        dist.HashStore(),
    )
    queues = [Counted(order, number, board=board, name="rollout") for number in range(engines)]
    clock = Clock(engines)

    def work(number: int, stop: Stop) -> dict[int, Rollout]:
        engine = AsLongAsItsSeed(RolloutConfig(max_batch=slots), vocabulary=9, stop_ids=[3])
        engine.load_weights([], version=0)
        tasks = Tasks(prompts, lengths, expected, Sampling(1.0))
        environment = SingleTurnEnvironment()
        with PendingRequests(engine, tasks, queues[number], environment, None) as pending:
            assert pending.go_on(stop)
            return pending.judging.scored()

    completions = [
        (place, completion.chosen_tokens)
        for found in clock.run(work)
        for place, completion in found.items()
    ]
    assert sorted(completions) == list(enumerate(lengths)), "an answer is missing, or there twice"
    return clock.steps


def drawn(tail: str, seed: int) -> tuple[list[Prompt], list[int], list[float]]:
    """Returns requests, the tokens of their completions, and the expected ones."""
    rng = random.Random(f"{tail}/{seed}")
    prompts, lengths, expected = list[Prompt](), list[int](), list[float]()
    for number in range(PROMPTS):
        hard = rng.lognormvariate(0.0, 0.5)
        one = [
            60 * rng.lognormvariate(0.0, 0.8)
            if tail == "lognormal"
            else 30 * rng.paretovariate(1.3)
            for _ in range(SIBLINGS)
        ]
        whole = [min(LIMIT, max(1, round(hard * length))) for length in one]
        prompts += [Prompt((5, number), index=number)] * SIBLINGS
        lengths += whole
        expected += [sum(whole) / SIBLINGS * rng.lognormvariate(0.0, GUESS)] * SIBLINGS
    return prompts, lengths, expected


def running_dry(folder: Path) -> dict[str, float]:
    """Measures the share of the engines' steps, until the last has ended, in which one is idle; and
    of their slots'.
    """
    found: dict[str, float] = {}
    for tail in ("lognormal", "Pareto"):
        for engines in (4, 8):
            for dealt_once in (True, False):
                rollouts = [drawn(tail, seed) for seed in range(DRAWS)]
                taken = [
                    steps_of(*rollout, engines, SLOTS, dealt_once=dealt_once)
                    for rollout in rollouts
                ]
                last = [max(steps) for steps in taken]
                name = f"{tail}, {engines} engines, {'dealt once' if dealt_once else 'taken when dry'}: "
                found[name + "steps"] = sum(last) / DRAWS
                found[name + "idle engines"] = 1 - sum(map(sum, taken)) / (engines * sum(last))
                tokens = sum(math.fsum(lengths) for _, lengths, _ in rollouts)
                found[name + "idle slots"] = 1 - tokens / (engines * SLOTS * sum(last))
    return found


def through_an_environment(folder: Path) -> dict[str, float]:
    """Measures a rollout of the demo's size, 64 prompts with 8 completions of at most 4 tokens, and
    one of 200 tokens: each through the single-turn environment, against direct calls of the same
    engine.
    """
    found: dict[str, float] = {}
    for longest in (4, 200):
        own = folder / str(longest)
        (row,) = run_ranks(1, environment_body, own, longest, timeout=600)
        found |= {f"{longest} tokens: {name}": value for name, value in row.items()}
    return found


def environment_body(world: World, folder: Path, longest: int) -> dict[str, float]:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    model = save_tiny(folder, "qwen2", hidden_size=128, vocab_size=64)
    config = RolloutConfig(
        max_prompt_tokens=8, max_response_tokens=longest, cpu_cache_gib=0.25, max_batch=256
    )
    manager = build_manager(model, ParallelConfig())
    engine = VLLMEngine(model, config, world, dtype="float32", stop_ids=[1])
    pool = EnginePool(
        engine,
        DevicePhases({"policy": manager.residency}, offload=False),
        world,
        SingleTurnEnvironment(),
        processes_per_engine=1,
        restarts=0,
    )
    pool.weight_sync(manager.shards(), bucket_bytes=2**20).push(version=0)
    size = 512 if longest < 100 else 64
    prompts = [Prompt((5, 9 + place // 8 % 50, 3)) for place in range(size)]
    asked: dict[str, Any] = {"seeds": range(size), "sampling": Sampling(1.0)}
    both = compare(
        lambda: pool.generate(prompts, **asked), lambda: engine.generate(prompts, **asked), rounds=5
    )
    engine.close()
    return {
        "environment_seconds": both.ours,
        "engine_seconds": both.theirs,
        "environment_over_engine": 1 / both.ratio,
    }
