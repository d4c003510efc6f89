"""The whole program for a few steps on one device: the demo's task, model and engine, bfloat16
where the device trains in it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.sheet import Figures, Sheet

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/arithmetic"
PHASES = ("rollout", "score", "update", "push")


class Sizes(NamedTuple):
    warm_steps: int
    steps: int
    prompts: int


SIZES = Sizes(warm_steps=100, steps=10, prompts=64)
SMALL = Sizes(warm_steps=2, steps=2, prompts=8)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sheet.row("train_rl.py", lambda: run(Path(folder), sizes))


def run(folder: Path, sizes: Sizes, overrides: Sequence[str] = ()) -> Figures:
    data, model = folder / "data", folder / "model"
    python(EXAMPLE / "make_data.py", data)
    python(EXAMPLE / "warm_start.py", data / "warm_start.jsonl", model, "--steps", sizes.warm_steps)
    begin = time.time()
    python(
        ROOT / "train_rl.py", EXAMPLE / "grpo.yaml", f"model.path={model}", f"data.train={data / 'train.jsonl'}",
        f"data.eval={data / 'eval.jsonl'}", f"trainer.output={folder / 'out'}", "parallel.tensor=1", "parallel.pipeline=1",
        f"trainer.steps={sizes.steps}", f"trainer.prompts_per_step={sizes.prompts}", f"trainer.eval_every={sizes.steps}",
        *overrides,
    )  # fmt: skip
    records = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return summary(records, begin)


def python(*command: object) -> None:
    """Raises CalledProcessError. The program is no rank of ours."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    subprocess.run([sys.executable, *map(str, command)], check=True, cwd=ROOT, env=environment)


def summary(records: list[dict[str, Any]], begin: float) -> Figures:
    """Sums up the metrics of a run: the first line is the evaluation before the first step."""
    start, *steps = records
    return {
        "steps": len(steps),
        "seconds_to_the_first_step": start["time"] - begin,
        **{
            f"{phase}_seconds": statistics.median(step[f"seconds_{phase}"] for step in steps)
            for phase in PHASES
        },
        "logprob_gap_max": max(step["logprob_gap_max"] for step in steps),
        "accuracy_before": start["eval_exact_match"],
        "accuracy_after": steps[-1]["eval_exact_match"],
    }
