"""Servers that see: images and videos reach a real vLLM server through shared memory, and after
every push it says of them what the trainer says.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.runtime.parallel import shared
from tests.distributed.test_vision import likelihood
from tests.distributed.test_vision_engine import prompts_of, scored
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.tiny_vision import IM_END, save_tiny_vision
from tests.video_rows import rows_with_videos
from tests.vision_rows import experience_of, rows_with_images

SIBLINGS = 3  # answers to each prompt
TEMPERATURE = 0.7


def body(
    world: Any, folder: Path, logs: Path, parallel: ParallelConfig, videos: bool
) -> dict[str, Any]:
    config = RolloutConfig(
        max_prompt_tokens=140 if videos else 80,
        max_response_tokens=6,
        cpu_cache_gib=0.05,
        max_batch=32,
        max_images=3,
        max_videos=2 if videos else 0,
    )
    actor = build_actor(folder, parallel, temperature=TEMPERATURE, token_cap=180)
    engine = ServerEngine(folder, config, world, dtype="float32", stop_ids=[IM_END], logs=logs)
    weights = engine.weight_sync(actor.manager.shards(), bucket_bytes=50_000)
    asked = [prompt for prompt in prompts_of(folder, videos=videos) for _ in range(SIBLINGS)]
    made: list[str] = []
    closed: list[str] = []
    watched(made, closed)

    def completions_to(prompts: list[Prompt]) -> list[Completion]:
        seeds = list(range(len(prompts)))
        told = [engine.generate(prompts, seeds=seeds, sampling=Sampling(TEMPERATURE))]
        torch.distributed.broadcast_object_list(told)
        return told[0]

    found: dict[str, Any] = {"engine": [], "trainer": [], "made": [], "refused": ""}
    for version in range(2):  # the second time other weights, the same images: no stale cache
        weights.push(version=version)
        first = completions_to(asked)
        found["made"].append((len(made), sorted(made) == sorted(closed)))
        continued = [
            Prompt((*p.token_ids, *a.token_ids), images=p.images)
            for p, a in zip(asked, first, strict=True)
        ]  # a second turn, of tokens that are expanded
        second = completions_to(continued)
        found["engine"].append([torch.tensor(a.logprobs) for a in first + second])
        found["trainer"].append(scored(actor, asked, first) + scored(actor, continued, second))
        rows = rows_with_videos(folder) if videos else rows_with_images(folder)
        actor.step(experience_of(rows), likelihood)
    if world.is_main:
        with pytest.raises(EngineError) as caught:
            engine.generate([a_feature_short(asked)], seeds=[0], sampling=Sampling(1.0))
        found["refused"] = str(caught.value)
    engine.close()
    return found


def a_feature_short(prompts: list[Prompt]) -> Prompt:
    """Returns a prompt whose last image has other features than the server makes of it."""
    prompt = next(p for p in prompts if p.images and p.images[-1].frames is None)
    *others, image = prompt.images
    ids = [*prompt.token_ids[: image.end - 1], *prompt.token_ids[image.end :]]
    return Prompt(tuple(ids), images=(*others, replace(image, tokens=image.tokens - 1)))


def watched(made: list[str], closed: list[str]) -> None:
    """Notes which shared memory is made and closed."""
    create, close = shared.create, shared.close

    def noting_create(size: int) -> str:
        made.append(create(size))
        return made[-1]

    def noting_close(name: str) -> None:
        closed.append(name)
        close(name)

    shared.create, shared.close = noting_create, noting_close


@pytest.mark.parametrize(
    ("kind", "processes", "parallel", "videos"),
    [
        pytest.param("qwen2_5_vl", 1, ParallelConfig(), True, marks=pytest.mark.ranks),
        pytest.param("qwen3_vl_moe", 2, ParallelConfig(expert=2), False, marks=pytest.mark.ranks),
        pytest.param("qwen2_vl", 2, ParallelConfig(tensor=2), False, marks=pytest.mark.ranks),
        pytest.param("qwen3_vl", 2, ParallelConfig(pipeline=2), True, marks=pytest.mark.ranks),
    ],
)
def test_after_every_push_a_server_says_of_images_what_the_trainer_says(
    kind: str, processes: int, parallel: ParallelConfig, videos: bool, tmp_path: Path
) -> None:
    folder = save_tiny_vision(tmp_path / "model", kind)
    runs = run_ranks(processes, body, folder, tmp_path / "logs", parallel, videos, timeout=300)
    distinct = {
        image.digest for prompt in prompts_of(folder, videos=videos) for image in prompt.images
    }
    for found in runs:
        for engines, trainers in zip(found["engine"], found["trainer"], strict=True):
            gaps = [
                (ours - theirs).abs().max() for ours, theirs in zip(engines, trainers, strict=True)
            ]
            assert max(gaps) < 1e-5
        moved = [
            float((first[:1] - second[:1]).abs().max())
            for first, second in zip(*found["trainer"], strict=True)
        ]
        assert max(moved) > 1e-2, "the second push brought nothing new"
    made, all_closed = runs[0]["made"][0]
    assert made == len(distinct), "an image was put into memory more or less than once"
    assert all_closed
    assert "tokens of a prompt with" in runs[0]["refused"]
