"""Runs the whole program for a few steps on one device: the demo's task, model and engine, bfloat16
if the device supports training in it, with both backends and with LoRA.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.sheet import Figures, Sheet

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/arithmetic"
PHASES = ("rollout", "score", "update", "push")
BACKENDS = {"Megatron": (), "FSDP2": ("backend=fsdp",), "LoRA": ("model.lora.rank=16",)}


class Sizes(NamedTuple):
    warm_steps: int
    steps: int
    prompts: int
    memory_fraction: float


SIZES = Sizes(warm_steps=100, steps=10, prompts=64, memory_fraction=0.3)
SMALL = Sizes(warm_steps=2, steps=2, prompts=8, memory_fraction=0.3)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = sheet.row("model", lambda: prepare(EXAMPLE, folder, sizes.warm_steps))
        for row, options in BACKENDS.items():
            if made is None:
                sheet.skip(row, "its model could not be made")
            else:
                sheet.row(row, partial(run, folder, row, sizes, options))


def prepare(example: Path, folder: Path, warm_steps: int) -> Figures:
    """Generates the example's data and its model in `folder`."""
    begin = time.time()
    python(example / "make_data.py", folder / "data")
    python(
        example / "warm_start.py",
        folder / "data/warm_start.jsonl",
        folder / "model",
        "--steps",
        warm_steps,
    )
    return {"seconds": time.time() - begin}


def run(folder: Path, name: str, sizes: Sizes, options: Sequence[str]) -> Figures:
    """Trains the model in `folder`, and summarizes the run's metrics."""
    return trained(
        EXAMPLE / "grpo.yaml",
        folder / f"out-{name}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'data/train.jsonl'}",
        f"data.eval={folder / 'data/eval.jsonl'}",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        f"rollout.memory_fraction={sizes.memory_fraction}",
        f"trainer.steps={sizes.steps}",
        f"trainer.prompts_per_step={sizes.prompts}",
        f"trainer.eval_every={sizes.steps}",
        *options,
    )


def trained(config: Path, output: Path, *options: str) -> Figures:
    """Runs train_rl.py and returns figures of its metrics."""
    begin = time.time()
    python(ROOT / "train_rl.py", config, f"trainer.output={output}", *options)
    took = time.time() - begin
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {**summary(records, begin), "seconds": took}


def python(*command: object) -> None:
    """Runs a Python program. Raises CalledProcessError."""
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT, env=environment())


def environment() -> dict[str, str]:
    """Returns the environment variables without those of a rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }


def summary(records: list[dict[str, Any]], begin: float) -> Figures:
    """Summarizes the metrics of a run: the first line is the evaluation before the first step.

    Medians omit the first step if there are others, since kernels are compiled in it.
    """
    start, *steps = records
    accuracy = next(
        name
        for name in ("eval_exact_match", "eval_held_out_exact_match", "eval_reward")
        if name in start
    )
    later = steps[1:] or steps

    def median(name: str) -> float | None:
        found = [step[name] for step in later if name in step]
        return statistics.median(found) if found else None

    phases = {phase: median(f"seconds_{phase}") or 0.0 for phase in PHASES}
    return {
        "steps": len(steps),
        "seconds_to_the_first_step": start["time"] - begin,
        "step_seconds": sum(phases.values()),
        **{f"{phase}_seconds": seconds for phase, seconds in phases.items()},
        "first_step_seconds": sum(steps[0][f"seconds_{phase}"] for phase in PHASES),
        **{
            name: median(name)
            for name in (
                "tokens_per_second_rollout",
                "tokens_per_second_update",
                "tflops_update",
                "mfu_update",
                "response_length",
            )
        },
        # a colocated engine is idle while the trainer works
        "engine_idle_share": 1 - phases["rollout"] / max(sum(phases.values()), 1e-9),
        **{f"peak_gib_{phase}": _gib(median(f"memory_mib_{phase}")) for phase in PHASES},
        "logprob_gap_max": max(step["logprob_gap_max"] for step in steps),
        "logprob_gap_mean": max(step["logprob_gap_mean"] for step in steps),
        "accuracy_before": start[accuracy],
        "accuracy_after": steps[-1][accuracy],
        "rewards": " ".join(f"{step['reward']:.3f}" for step in steps),
    }


def _gib(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024
