"""Whole steps of the demo, from prompts to pushed weights, in one process: ours and TRL's by turns."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PYTHON = "RFTMEGA_TRL_PYTHON"  # an environment made from requirements/trl.txt
ROOT = Path(__file__).parents[1]
STEPS, WARM_UP, ROUNDS = 14, 4, 3


def step(folder: Path) -> dict[str, float]:
    """Seconds a step: 64 prompts x 8 answers, two optimizer steps, KL to the reference.

    Nothing without TRL.
    """
    python = os.environ.get(PYTHON, "")
    if not python:
        sys.stderr.write(
            f"{PYTHON} names no Python: python3 -m venv E && E/bin/pip install -r requirements/trl.txt makes one\n"
        )
        return {}
    example = ROOT / "examples" / "arithmetic"
    for script in ("make_data.py", "warm_start.py"):
        subprocess.run([sys.executable, example / script], cwd=ROOT, check=True)
    ours, theirs = [], []
    for number in range(ROUNDS):
        ours += _ours(example / "grpo.yaml", folder / f"ours-{number}")
        theirs += _theirs(python, ROOT / "runs" / "demo")
    return {
        "ours_seconds": statistics.median(ours),
        "trl_seconds": statistics.median(theirs),
        "ours_over_trl": statistics.median(ours) / statistics.median(theirs),
    }


def _ours(config: Path, output: Path) -> list[float]:
    options = [
        "parallel.tensor=1",
        "parallel.pipeline=1",
        f"trainer.steps={STEPS}",
        "trainer.eval_every=0",
    ]
    options += ["trainer.export=false", "data.eval=", f"trainer.output={output}"]
    subprocess.run(
        [sys.executable, "train_rl.py", config, *options, "--processes", "1"], cwd=ROOT, check=True
    )
    ends = [
        json.loads(line)["time"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    return _differences(ends[1:])  # the first line is of the start


def _theirs(python: str, demo: Path) -> list[float]:
    command = [
        python,
        Path(__file__).with_name("trl_step.py"),
        demo / "model",
        demo / "data" / "train.jsonl",
        str(STEPS),
    ]
    said = subprocess.run(
        list(map(str, command)), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return list(json.loads(said.splitlines()[-1]))[WARM_UP:]


def _differences(ends: list[float]) -> list[float]:
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return steps[WARM_UP - 1 :]
