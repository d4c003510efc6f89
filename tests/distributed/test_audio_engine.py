"""Engines that hear: after every push vLLM says of waveforms what the trainer says, and what
transformers says.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Prompt, Sampling
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.rollout.pool.colocated_weights import ColocatedWeights
from rftmega.run.placement.colocated import ColocatedPolicy
from rftmega.run.placement.phases import DevicePhases
from rftmega.weights import EngineWeights, Exporter
from tests.audio_rows import audio_rows, rows_with_waveforms, with_files
from tests.distributed.test_vision import likelihood
from tests.distributed.test_vision_engine import SEEDS, scored
from tests.layouts import build_actor
from tests.ranks import VLLM, run_ranks
from tests.rollouts import completion_of, pool_of
from tests.tiny_audio import IM_END, save_tiny_audio
from tests.vision_rows import experience_of

PRELOADED = VLLM

WINDOW = 30  # seconds: vLLM takes no other


def prompts_of(folder: Path) -> list[Prompt]:
    """The rows of audio_rows, to be gone on with; waveforms are files."""
    tokens, placed = audio_rows(folder)
    return [
        Prompt(tuple(ids), images=with_files(folder, own))
        for ids, own in zip(tokens, placed, strict=True)
    ]


def body(world: Any, folder: Path, parallel: ParallelConfig, engine_size: int) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        tensor=engine_size,
        max_prompt_tokens=80,
        max_response_tokens=6,
        cpu_cache_gib=0.05,
        max_batch=4,
        max_images=3,
    )
    actor = build_actor(folder, parallel, temperature=0.7, token_cap=160)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[IM_END])
    oracle = TransformersEngine(folder, config, stop_ids=[IM_END], where=torch.device("cpu"))
    turns = DevicePhases({"policy": actor.manager.residency}, engine=engine, offload=True)
    weights = ColocatedWeights(
        EngineWeights(actor.manager.shards(), engine, bucket_bytes=50_000), turns
    )
    shared = pool_of(engine, turns, world, weights, processes_per_engine=engine_size, restarts=1)
    policy = ColocatedPolicy(actor, turns)
    exporter = Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=50_000)
    prompts = prompts_of(folder)
    found = []
    for version in range(2):  # the second time other weights, the same waveforms: no stale cache
        pushed = weights.push(version=version)
        assert pushed["push_bytes"] == pushed["push_bytes_least"]
        oracle.load_weights(exporter, version=version)
        rollouts = shared.generate(prompts, seeds=SEEDS, sampling=Sampling(0.7))
        completions = [completion_of(rollout) for rollout in rollouts]
        continued = [
            Prompt((*p.token_ids, *a.token_ids), images=p.images)
            for p, a in zip(prompts, completions, strict=True)
        ]  # a second turn, of tokens that are expanded
        second = [
            completion_of(r)
            for r in shared.generate(continued, seeds=SEEDS, sampling=Sampling(0.7))
        ]
        greedy = [
            completion_of(r) for r in shared.generate(prompts, seeds=SEEDS, sampling=Sampling(0.0))
        ]
        told = oracle.generate(prompts, seeds=SEEDS, sampling=Sampling(0.0))
        trainers = scored(policy, prompts, completions) + scored(policy, continued, second)
        found.append(
            {
                "engine": [torch.tensor(a.logprobs) for a in completions + second],
                "trainer": trainers,
                "greedy": [list(a.token_ids) for a in greedy],
                "oracle": [list(a.token_ids) for a in told],
            }
        )
        policy.step(experience_of(rows_with_waveforms(folder)), likelihood)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("processes", "parallel", "engine_size"),
    [
        pytest.param(2, ParallelConfig(tensor=2), 1, marks=pytest.mark.ranks),
        (1, ParallelConfig(), 1),
        pytest.param(2, ParallelConfig(pipeline=2), 2, marks=pytest.mark.ranks),
    ],
)
def test_after_every_push_the_engine_says_of_waveforms_what_the_trainer_says(
    processes: int, parallel: ParallelConfig, engine_size: int, tmp_path: Path
) -> None:
    save_tiny_audio(tmp_path, seconds=WINDOW)
    for found in run_ranks(processes, body, tmp_path, parallel, engine_size, timeout=300):
        for version in found:
            for engines, trainers in zip(version["engine"], version["trainer"], strict=True):
                assert (engines - trainers).abs().max() < 1e-5
            assert version["greedy"] == version["oracle"]
        moved = [
            float((first[:1] - second[:1]).abs().max())
            for first, second in zip(found[0]["trainer"], found[1]["trainer"], strict=True)
        ]
        assert max(moved) > 1e-2, "the second push brought nothing new"
