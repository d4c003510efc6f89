"""Trains a published model (examples/smollm) for 15 steps on one device, with both backends and
LoRA; and with TRL's GRPOTrainer on the same model, prompts and numbers of completions.

RFTMEGA_SMOLLM names a folder with `model` and `data`, as examples/smollm describes.
"""

import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.against_trl import trl_steps
from benchmarks.gpu.loop import BACKENDS, ROOT, environment, trained
from benchmarks.gpu.sheet import Figures, Sheet

FOLDER = "RFTMEGA_SMOLLM"
CONFIG = ROOT / "examples/smollm/grpo.yaml"


class Sizes(NamedTuple):
    steps: int
    prompts: int  # per step
    samples: int  # per prompt
    tokens: int  # maximum per completion
    memory_fraction: float
    trl_steps: int


SIZES = Sizes(steps=15, prompts=64, samples=8, tokens=24, memory_fraction=0.4, trl_steps=6)
SMALL = Sizes(steps=2, prompts=2, samples=2, tokens=4, memory_fraction=0.4, trl_steps=2)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    folder = Path(os.environ.get(FOLDER) or ROOT / "runs/smollm")
    rows = {
        "Megatron": partial(ours, folder, sizes, BACKENDS["Megatron"]),
        "FSDP2": partial(ours, folder, sizes, BACKENDS["FSDP2"]),
        "TRL": partial(theirs, folder, sizes, "transformers"),
        "LoRA": partial(ours, folder, sizes, BACKENDS["LoRA"]),
        "TRL with vLLM": partial(theirs, folder, sizes, "vllm"),
    }
    for name, work in rows.items():
        if (folder / "model/config.json").is_file():
            sheet.row(name, work)
        else:
            sheet.skip(name, f"{folder} has no model; {FOLDER} names another folder")


def ours(folder: Path, sizes: Sizes, options: tuple[str, ...]) -> Figures:
    with tempfile.TemporaryDirectory() as output:
        return trained(
            CONFIG,
            Path(output),
            f"model.path={folder / 'model'}",
            f"data.train={folder / 'data/train.jsonl'}",
            f"data.eval={folder / 'data/eval.jsonl'}",
            f"rollout.samples_per_prompt={sizes.samples}",
            f"rollout.max_response_tokens={sizes.tokens}",
            f"rollout.memory_fraction={sizes.memory_fraction}",
            f"rollout.max_batch={sizes.prompts * sizes.samples}",
            f"trainer.steps={sizes.steps}",
            f"trainer.prompts_per_step={sizes.prompts}",
            f"trainer.eval_every={sizes.steps}",
            "trainer.max_tokens_per_micro_batch=16384",
            *(("optimizer.learning_rate=1e-4",) if "model.lora.rank=16" in options else ()),
            *options,
        )


def theirs(folder: Path, sizes: Sizes, engine: str) -> Figures:
    given = {
        "model": str(folder / "model"),
        "data": str(folder / "data/train.jsonl"),
        "label": "answer",
        "pattern": r"-?\d+",
        "steps": sizes.trl_steps,
        "prompts": sizes.prompts,
        "samples": sizes.samples,
        "tokens": sizes.tokens,
        "kl": 0.0,
        "learning_rate": 5e-6,
        "engine": engine,
        "memory_fraction": sizes.memory_fraction,
    }
    told = trl_steps(sys.executable, given, environment())
    later = told["seconds"][1:] or told["seconds"]
    return {
        "steps": len(told["seconds"]),
        "step_seconds": statistics.median(later),
        "first_step_seconds": told["seconds"][0],
        "peak_gib": told["peak_gib"],
        "rewards": " ".join(f"{reward:.3f}" for reward in told["rewards"]),
    }
