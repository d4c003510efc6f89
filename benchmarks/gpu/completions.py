"""Compares greedy completions of vLLM with those of transformers, in float32, after a push, and
after a sleep and a push of other weights.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.sheet import Figures, Sheet
from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.runtime import device
from rftmega.weights import EngineWeights, Exporter
from tests.layouts import build_manager
from tests.tiny_models import VOCABULARY, save_tiny

BUCKET_BYTES = 2**20


class Sizes(NamedTuple):
    shape: dict[str, int]
    prompts: int
    completion_tokens: int


WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 8,
}
SIZES = Sizes(WIDE, prompts=32, completion_tokens=64)
SMALL = Sizes({}, prompts=4, completion_tokens=8)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    from rftmega.rollout.engines.vllm import VLLMEngine

    config = RolloutConfig(
        max_prompt_tokens=32, max_response_tokens=sizes.completion_tokens, max_batch=sizes.prompts, memory_fraction=0.2,
        cpu_cache_gib=0.05,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny(Path(name), "qwen3", **sizes.shape)
        engine = VLLMEngine(folder, config, world, dtype="float32", stop_ids=[1])
        manager = build_manager(folder, ParallelConfig())
        oracle = TransformersEngine(folder, config, stop_ids=[1], where=device.current().here())
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=BUCKET_BYTES)
    torch.manual_seed(3)
    lengths = torch.randint(1, 30, (sizes.prompts,)).tolist()
    prompts = [
        Prompt(tuple(torch.randint(2, VOCABULARY, (length,)).tolist()), index=i)
        for i, length in enumerate(lengths)
    ]

    def compared(version: int) -> Figures:
        weights.push(version=version)
        oracle.load_weights(
            Exporter(manager.shards(), manager.topology.replica_group, bucket_bytes=BUCKET_BYTES),
            version=version,
        )
        ours, theirs = (
            x.generate(prompts, seeds=range(sizes.prompts), sampling=Sampling(0.0))
            for x in (engine, oracle)
        )
        return agreement(ours, theirs)

    def after_a_sleep() -> Figures:
        engine.sleep()
        with torch.no_grad():
            for chunk in manager.chunks:
                for parameter in chunk.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        manager.weights_changed()
        return compared(1)

    sheet.row("after the first push", lambda: compared(0))
    sheet.row("after sleep and other weights", after_a_sleep)
    engine.close()


def agreement(ours: list[Completion], theirs: list[Completion]) -> Figures:
    """Returns the number of equal completions, and their largest log-prob difference."""
    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
    gaps = [abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return {"answers": len(ours), "equal": len(same), "logprob_gap_max": max(gaps, default=None)}
