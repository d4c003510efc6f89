"""Measures the overhead of a vLLM server over the same engine in the trainer's process: completions
of four tokens, whose time is nearly all outside the model.
"""

import os
from pathlib import Path
from typing import Any

from benchmarks.timing import compare
from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Prompt, Sampling
from rftmega.runtime.parallel.process_group import World
from tests.layouts import build_manager
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

PROMPTS, SIBLINGS, TOKENS = 64, 8, 4


def against_in_process(folder: Path) -> dict[str, float]:
    """Returns requests per second of one server, and its time relative to an engine in the calling
    process.
    """
    (found,) = run_ranks(1, both_body, folder, timeout=600)
    return dict(found)


def both_body(world: World, folder: Path) -> dict[str, float]:
    from rftmega.rollout.engines.vllm import VLLMEngine
    from rftmega.rollout.servers.server_engine import ServerEngine

    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    model = save_tiny(folder, "qwen2", hidden_size=128, vocab_size=64)
    config = RolloutConfig(
        max_prompt_tokens=8, max_response_tokens=TOKENS, cpu_cache_gib=0.25, max_batch=256
    )
    shards = build_manager(model, ParallelConfig()).shards()
    given: dict[str, Any] = {"dtype": "float32", "stop_ids": [1]}
    near = VLLMEngine(model, config, world, **given)
    far = ServerEngine(model, config, world, logs=folder / "logs", **given)
    for engine in (near, far):
        engine.weight_sync(shards, bucket_bytes=2**20).push(version=0)
    near.wake()
    size = PROMPTS * SIBLINGS
    prompts = [Prompt((5, 9 + place // SIBLINGS % 50, 3)) for place in range(size)]
    asked: dict[str, Any] = {"seeds": range(size), "sampling": Sampling(1.0)}
    both = compare(
        lambda: far.generate(prompts, **asked), lambda: near.generate(prompts, **asked), rounds=11
    )
    far.close()
    near.close()
    return {
        "server_seconds": both.ours,
        "in_process_seconds": both.theirs,
        "requests_a_second": size / both.ours,
        "server_over_in_process": 1 / both.ratio,
    }
