"""Measures vLLM in the trainer's process with 8B parameters: its start beside memory of another
process, pushes, sleep and wake, and tokens per second.

Plain vLLM is the same engine without our seeds and log-probs.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.models import QWEN3_8B, TINY, Shape, randomise, save_zeros
from benchmarks.gpu.sheet import Figures, Sheet
from benchmarks.timing import seconds
from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Prompt, Sampling
from rftmega.runtime import device
from rftmega.runtime.device.residency import PARAMETERS
from rftmega.weights import EngineWeights
from tests.layouts import build_manager

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, torch
from rftmega.runtime import device
kept = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device=device.current().here())
device.current().synchronize()
print("held", flush=True)
sys.stdin.read()
"""


class Sizes(NamedTuple):
    shape: Shape
    dtype: str
    held_gb: float  # held by another process while the engine starts
    memory_fraction: float
    prompts: int
    prompt_tokens: int
    completion_tokens: int
    max_batch: int
    rounds: int


SIZES = Sizes(
    QWEN3_8B,
    "bfloat16",
    30.0,
    0.5,
    prompts=512,
    prompt_tokens=256,
    completion_tokens=256,
    max_batch=256,
    rounds=3,
)
SMALL = Sizes(
    TINY,
    "float32",
    0.01,
    0.5,
    prompts=8,
    prompt_tokens=12,
    completion_tokens=8,
    max_batch=8,
    rounds=2,
)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    from rftmega.rollout.engines.vllm import VLLMEngine

    engine: Any = None
    with tempfile.TemporaryDirectory() as name:
        folder = save_zeros(Path(name), sizes.shape, dtype=sizes.dtype)
        manager = build_manager(folder, ParallelConfig(), dtype=sizes.dtype)
        randomise(manager)
        rollout = RolloutConfig(
            max_prompt_tokens=sizes.prompt_tokens, max_response_tokens=sizes.completion_tokens, max_batch=sizes.max_batch,
            memory_fraction=sizes.memory_fraction, cpu_cache_gib=0.05,
        )  # fmt: skip

        def start() -> Figures:
            nonlocal engine
            manager.residency.only()  # a run's trainer is offloaded while its engine starts
            with holding(int(sizes.held_gb * 1e9)):
                before = device.current().room()
                begin = time.perf_counter()
                engine = VLLMEngine(folder, rollout, world, dtype=sizes.dtype, stop_ids=[])
                took = time.perf_counter() - begin
                after = device.current().room()
            gib = 2**30
            return {
                "start_seconds": took,
                "held_gb": sizes.held_gb,
                "room_gib": before / gib,
                "taken_gib": (before - after) / gib,
            }

        if sheet.row("start", start) is None:
            for row in ("first push", "push", "sleep and wake", "tokens"):
                sheet.skip(row, "the engine did not start")
            return
        with_engine(sheet, sizes, manager, engine)
        engine.close()


@contextmanager
def holding(size: int) -> Iterator[None]:
    """Makes another process hold so many bytes of the device within a `with` block."""
    command = [sys.executable, "-c", HOLD, str(size)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        try:
            assert other.stdout.readline() == "held\n", f"{size:,} bytes could not be held"
            yield
        finally:
            other.stdin.close()


def with_engine(sheet: Sheet, sizes: Sizes, manager: Any, engine: Any) -> None:
    residency, versions = manager.residency, count()
    weights: list[EngineWeights] = []
    total = sum(item.parameter.nbytes for item in manager.bound if item.rule.exported)
    engine.sleep()
    residency.on(PARAMETERS)

    def push() -> None:
        weights[0].push(version=next(versions))

    def first() -> Figures:
        plan = seconds(
            lambda: weights.append(
                EngineWeights(manager.shards(), engine, bucket_bytes=256 * 2**20)
            )
        )
        return {"plan_seconds": plan, "push_seconds": seconds(push)}

    def later() -> Figures:
        took = sorted(seconds(push) for _ in range(sizes.rounds))[sizes.rounds // 2]
        tensors = sum(len(item.rule.hf) for item in manager.bound if item.rule.exported)
        return {
            "push_seconds": took,
            "gigabytes": total / 1e9,
            "gb_s": total / took / 1e9,
            "tensors": tensors,
            "us_a_tensor": took / tensors * 1e6,
        }

    def sleep() -> Figures:
        engine.wake()  # including its cache
        before = device.current().room()
        asleep = seconds(engine.sleep)
        freed = device.current().room() - before
        return {
            "sleep_seconds": asleep,
            "freed_gib": freed / 2**30,
            "wake_seconds": seconds(engine.wake),
            "push_seconds": seconds(push),
        }

    sheet.row("first push", first)
    sheet.row("push", later)
    sheet.row("sleep and wake", sleep)
    residency.only()  # the engine runs while the trainer is offloaded
    sheet.row("tokens", lambda: tokens(sizes, engine))


def tokens(sizes: Sizes, engine: Any) -> Figures:
    """Measures sampled completions of equal length for random prompts."""
    from vllm import SamplingParams

    torch.manual_seed(2)
    ids = torch.randint(sizes.shape.vocabulary, (sizes.prompts, sizes.prompt_tokens)).tolist()
    prompts = [Prompt(tuple(row), index=number) for number, row in enumerate(ids)]
    plain = SamplingParams(
        temperature=1.0, max_tokens=sizes.completion_tokens, ignore_eos=True, detokenize=False
    )
    given = [{"prompt_token_ids": row} for row in ids]
    counted: dict[str, int] = {}

    def ours() -> None:
        completions = engine.generate(prompts, seeds=range(sizes.prompts), sampling=Sampling(1.0))
        counted["ours"] = sum(len(completion.token_ids) for completion in completions)

    def theirs() -> None:
        completions = engine._llm.generate(given, plain, use_tqdm=False)
        counted["plain"] = sum(len(completion.outputs[0].token_ids) for completion in completions)

    found = {}
    for name, work in (("ours", ours), ("plain", theirs)):
        work()
        engine._llm.reset_prefix_cache()
        found[name] = seconds(work)
        engine._llm.reset_prefix_cache()
    rate = {name: counted[name] / found[name] for name in found}
    return {
        "tokens": counted["ours"],
        "ours_tokens_a_second": rate["ours"],
        "plain_tokens_a_second": rate["plain"],
        "ours_over_plain": rate["ours"] / rate["plain"],
    }
