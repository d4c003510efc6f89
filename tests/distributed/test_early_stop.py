"""Engines of several processes that stop together, and the same way however fast each of them is."""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Completion, Metrics, Prompt, Rollout, Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.stop_consensus import EVERY
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.process_group import World
from rftmega.weights import EngineWeights
from tests.layouts import build_actor
from tests.ranks import VLLM, run_ranks
from tests.rollouts import Wrapped, pool_of
from tests.tiny_models import save_tiny

PRELOADED = VLLM

SIZE, GROUPS = 2, 12
REQUESTS = [Prompt((5, group), index=group) for group in range(GROUPS) for _ in range(SIZE)]


class AsLongAsItsSeed(ScriptedEngine):
    def __init__(self, pace: Callable[[], float]):
        super().__init__(RolloutConfig(max_batch=4), vocabulary=9, stop_ids=[3])
        self.pace = pace

    def _completion(self, seed: int) -> Completion:
        assert self.version is not None
        return Completion((3,) * seed, (0.0,) * seed, "stop", self.version)

    def _serve(self, requests: Any, sampling: Sampling) -> None:
        def slowly() -> bool:
            time.sleep(self.pace())
            return requests.stopped()

        super()._serve(Wrapped(requests, stopped=slowly), sampling)


class NoTurns(DevicePhases):
    def rollout(self) -> None: ...


class NoPush:
    def push(self, *, version: int) -> Metrics:
        raise AssertionError("nothing broke down")


def group_lengths() -> list[int]:
    """Tokens of each request: two groups in three end early."""
    rng = random.Random(1)
    return [rng.randint(1, 20) if place // SIZE % 3 else 200 for place in range(len(REQUESTS))]


def body(world: World, noise: int, per_engine: int, wanted: int, silent: bool) -> Any:
    rng = random.Random(f"{noise}/{world.rank}")
    engine = AsLongAsItsSeed(lambda: rng.random() * 0.002 if noise else 0.0)
    engine.load_weights([], version=7)
    shared = pool_of(
        engine,
        NoTurns({}, offload=False),
        world,
        NoPush(),
        processes_per_engine=per_engine,
        restarts=0,
    )

    def score(prompts: Sequence[Prompt], completions: Sequence[Rollout]) -> list[dict[str, float]]:
        time.sleep(rng.random() * 0.02 if noise else 0.0)
        return [{"reward": float(prompt.index)} for prompt in prompts]

    def enough(completions: Sequence[Rollout | None]) -> bool:
        groups = [completions[begin : begin + SIZE] for begin in range(0, len(completions), SIZE)]
        return sum(None not in group for group in groups) >= wanted

    found = shared.generate(
        REQUESTS,
        seeds=group_lengths(),
        sampling=Sampling(1.0),
        reward=None if silent else score,
        enough=enough,
    )
    return [None if c is None else (len(c.response_ids), c.scores) for c in found], engine.steps


@pytest.mark.parametrize("per_engine", [1, 2])
def test_engines_stop_after_the_same_step_with_the_same_answers_whatever_the_timing(
    per_engine: int,
) -> None:
    quick, slow = (run_ranks(2, body, noise, per_engine, 5, False) for noise in (0, 1))
    answers, steps = quick[0]
    assert all(result[0] == answers for result in (*quick, *slow)), "processes, or runs, disagree"
    assert {result[1] for result in (*quick, *slow)} == {steps}
    assert steps % EVERY == 0
    lengths = group_lengths()
    for place, completion in enumerate(answers):
        assert completion in (None, (lengths[place], {"reward": float(place // SIZE)}))
    assert (
        sum(None not in answers[begin : begin + SIZE] for begin in range(0, len(answers), SIZE))
        >= 5
    )
    assert None in answers


def test_where_there_is_never_enough_every_answer_comes_and_without_a_reward_no_scores() -> None:
    for answers, _ in run_ranks(2, body, 0, 1, GROUPS + 1, True):
        assert answers == [(length, None) for length in group_lengths()]


def vllm_body(world: World, folder: Path, engine_size: int) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        tensor=engine_size,
        max_prompt_tokens=8,
        max_response_tokens=120,
        cpu_cache_gib=0.05,
        max_batch=8,
    )
    actor = build_actor(folder, ParallelConfig(), temperature=1.0, token_cap=512)
    # One token in 25 ends an answer: most have some dozens, a few go on to the limit.
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=range(0, 120, 25))
    weights = EngineWeights(actor.manager.shards(), engine, bucket_bytes=50_000)
    weights.push(version=0)
    shared = pool_of(
        engine,
        NoTurns({}, offload=False),
        world,
        weights,
        processes_per_engine=engine_size,
        restarts=0,
    )

    def enough(completions: Sequence[Rollout | None]) -> bool:
        return sum(completion is not None for completion in completions) >= 10

    seeds = list(range(len(REQUESTS)))
    found = [
        shared.generate(REQUESTS, seeds=seeds, sampling=Sampling(1.0), enough=enough)
        for _ in range(2)
    ]
    left = engine._llm.llm_engine.has_unfinished_requests()
    everything = shared.generate(REQUESTS, seeds=seeds, sampling=Sampling(1.0))
    dist.barrier()
    engine.close()
    return [
        [None if c is None else c.response_ids for c in answers] for answers in (*found, everything)
    ], left


@pytest.mark.ranks
@pytest.mark.parametrize("engine_size", [1, 2])
def test_vllm_aborts_the_rest_and_what_it_is_asked_next_is_answered_as_ever(
    engine_size: int, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3", hidden_size=128)
    results = run_ranks(2, vllm_body, folder, engine_size, timeout=300)
    (first, second, whole), left = results[0]
    assert all(result == results[0] for result in results), "the processes have different answers"
    assert not left, "aborted requests are still in the engine"
    assert None in first and sum(completion is not None for completion in first) >= 10
    assert None not in whole
    for part in (first, second):
        assert all(
            completion in (None, complete) for completion, complete in zip(part, whole, strict=True)
        )
