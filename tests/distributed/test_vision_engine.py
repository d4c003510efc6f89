"""Engines that see: after every push vLLM says of images what the trainer says, and what
transformers says.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.media_positions import RowImages
from rftmega.core.types import Completion, Prompt, Rows, Sampling
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.rollout.pool.colocated_weights import ColocatedWeights
from rftmega.run.placement.colocated import ColocatedPolicy
from rftmega.run.placement.phases import DevicePhases
from rftmega.weights import EngineWeights, Exporter
from tests.distributed.test_vision import likelihood
from tests.layouts import build_actor, rows_of
from tests.ranks import VLLM, run_ranks
from tests.rollouts import completion_of, pool_of
from tests.tiny_vision import IM_END, save_tiny_vision
from tests.video_rows import LONG_ROWS, rows_with_videos, video_rows, with_files
from tests.vision_rows import experience_of, rows_with_images, vision_rows

PRELOADED = VLLM

SEEDS = [1, 2, 3, 4, 5, 6]


def prompts_of(folder: Path, *, videos: bool) -> list[Prompt]:
    """The rows of vision_rows or video_rows, to be gone on with; images are files."""
    tokens, placed = video_rows(folder, LONG_ROWS) if videos else vision_rows(folder)
    return [
        Prompt(tuple(ids), images=with_files(folder, own))
        for ids, own in zip(tokens, placed, strict=True)
    ]


def scored(policy: Any, prompts: list[Prompt], completions: list[Completion]) -> list[torch.Tensor]:
    """The trainer's log-probs of the answers."""
    ids = [[*p.token_ids, *a.token_ids] for p, a in zip(prompts, completions, strict=True)]
    rows = rows_of(ids, [len(prompt.token_ids) for prompt in prompts])
    images = RowImages.of(prompt.images for prompt in prompts)
    seen = Rows(rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, images)
    logp = policy.log_probs(seen.ragged()).logp.padded()
    return [own[mask] for own, mask in zip(logp, rows.mask, strict=True)]


def body(
    world: Any, folder: Path, parallel: ParallelConfig, engine_size: int, *, videos: bool = False
) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        tensor=engine_size,
        max_prompt_tokens=140 if videos else 80,
        max_response_tokens=6,
        cpu_cache_gib=0.05,
        max_batch=4,
        max_images=3,
        max_videos=2 if videos else 0,
    )
    actor = build_actor(folder, parallel, temperature=0.7, token_cap=180)
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[IM_END])
    oracle = TransformersEngine(folder, config, stop_ids=[IM_END], where=torch.device("cpu"))
    turns = DevicePhases({"policy": actor.manager.residency}, engine=engine, offload=True)
    weights = ColocatedWeights(
        EngineWeights(actor.manager.shards(), engine, bucket_bytes=50_000), turns
    )
    shared = pool_of(engine, turns, world, weights, processes_per_engine=engine_size, restarts=1)
    policy = ColocatedPolicy(actor, turns)
    exporter = Exporter(actor.manager.shards(), actor.topology.replica_group, bucket_bytes=50_000)
    prompts = prompts_of(folder, videos=videos)
    found = []
    for version in range(2):  # the second time other weights, the same images: no stale cache
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
        experience = experience_of(rows_with_videos(folder) if videos else rows_with_images(folder))
        policy.step(experience, likelihood)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kind", "processes", "parallel", "engine_size"),
    [
        pytest.param("qwen2_vl", 1, ParallelConfig(), 1, marks=pytest.mark.ranks),
        pytest.param("qwen3_vl", 2, ParallelConfig(tensor=2), 1, marks=pytest.mark.ranks),
        pytest.param("qwen3_vl_moe", 2, ParallelConfig(expert=2), 1, marks=pytest.mark.ranks),
        pytest.param("qwen2_5_vl", 2, ParallelConfig(pipeline=2), 1, marks=pytest.mark.ranks),
        pytest.param("qwen2_5_vl", 2, ParallelConfig(tensor=2), 2, marks=pytest.mark.ranks),
        pytest.param(
            "qwen3_vl", 4, ParallelConfig(tensor=2, pipeline=2), 2, marks=pytest.mark.ranks
        ),
        pytest.param(
            "qwen3_vl_moe",
            4,
            ParallelConfig(tensor=2, sequence=True, pipeline=2, expert=2),
            2,
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_after_every_push_the_engine_says_of_images_what_the_trainer_says(
    kind: str, processes: int, parallel: ParallelConfig, engine_size: int, tmp_path: Path
) -> None:
    save_tiny_vision(tmp_path, kind)
    assert_alike(run_ranks(processes, body, tmp_path, parallel, engine_size, timeout=300))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "processes", "parallel", "engine_size"),
    [
        ("qwen2_5_vl", 1, ParallelConfig(), 1),
        ("qwen2_vl", 1, ParallelConfig(), 1),
        ("qwen3_vl", 1, ParallelConfig(), 1),
        ("qwen3_vl", 2, ParallelConfig(tensor=2), 2),
    ],
)
def test_after_every_push_the_engine_says_of_videos_what_the_trainer_says(
    kind: str, processes: int, parallel: ParallelConfig, engine_size: int, tmp_path: Path
) -> None:
    save_tiny_vision(tmp_path, kind)
    shown = partial(body, videos=True)
    assert_alike(run_ranks(processes, shown, tmp_path, parallel, engine_size, timeout=300))


def assert_alike(runs: list[Any]) -> None:
    for found in runs:
        for version in found:
            for engines, trainers in zip(version["engine"], version["trainer"], strict=True):
                assert (engines - trainers).abs().max() < 1e-5
            assert version["greedy"] == version["oracle"]
        moved = [
            float((first[:1] - second[:1]).abs().max())
            for first, second in zip(found[0]["trainer"], found[1]["trainer"], strict=True)
        ]
        assert max(moved) > 1e-2, "the second push brought nothing new"


def awake_body(world: Any, folder: Path) -> Any:
    """An engine that gets other weights without having slept, as one of a server does."""
    from rftmega.rollout.engines.vllm import VLLMEngine

    config = RolloutConfig(
        max_prompt_tokens=80, max_response_tokens=6, cpu_cache_gib=0.05, max_batch=4, max_images=3
    )
    engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[IM_END])
    oracle = TransformersEngine(folder, config, stop_ids=[IM_END], where=torch.device("cpu"))
    prompts = prompts_of(folder, videos=False)
    found = []
    for version in range(2):
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if "visual" in name:
                tensor.mul_(1 + 2 * version)
        for each in (engine, oracle):
            each.load_weights(iter(tensors.items()), version=version)
            told = each.generate(prompts, seeds=SEEDS, sampling=Sampling(0.0))
            found.append([(list(own.token_ids), list(own.logprobs)) for own in told])
    engine.close()
    return found


def test_features_of_images_that_were_computed_before_a_push_do_not_serve_after_it(
    tmp_path: Path,
) -> None:
    save_tiny_vision(tmp_path, "qwen2_vl")
    ((first, first_told, second, second_told),) = run_ranks(1, awake_body, tmp_path, timeout=300)
    for ours, theirs in ((first, first_told), (second, second_told)):
        for (ids, logprobs), (wanted, told) in zip(ours, theirs, strict=True):
            assert ids == wanted
            assert logprobs == pytest.approx(told, abs=1e-5)
    assert first != second
