"""Compares whole steps of the demo, from prompts to pushed weights, with TRL's, alternating in one
process.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PYTHON = "RFTMEGA_TRL_PYTHON"  # Python of an environment with requirements/trl.txt
ROOT = Path(__file__).parents[1]
STEPS, WARM_UP, ROUNDS = 14, 4, 3


def step(folder: Path) -> dict[str, float]:
    """Measures the seconds per step: 64 prompts x 8 completions, two optimizer steps, KL to the
    reference.

    Returns an empty dict without TRL.
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
    return _differences(ends[1:])  # the first line is the evaluation before training


def _theirs(python: str, demo: Path) -> list[float]:
    given = {
        "model": str(demo / "model"),
        "data": str(demo / "data" / "train.jsonl"),
        "label": "label",
        "pattern": "",
        "steps": STEPS,
        "prompts": 64,
        "samples": 8,
        "tokens": 4,
        "kl": 0.001,
        "learning_rate": 1e-4,
        "engine": "transformers",
    }
    return list(trl_steps(python, given, dict(os.environ))["seconds"])[WARM_UP:]


def trl_steps(python: str, given: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Runs `trl_step.py` with the options `given` and returns its output. Raises
    CalledProcessError.
    """
    said = subprocess.run(
        [python, str(Path(__file__).with_name("trl_step.py")), json.dumps(given)],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return json.loads(said.splitlines()[-1])


def _differences(ends: list[float]) -> list[float]:
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return steps[WARM_UP - 1 :]
