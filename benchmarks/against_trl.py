"""Compares whole steps with TRL's, from prompts to pushed weights: those of the demo, alternating in
one process, and those of a published model (examples/smollm).
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

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


PRETRAINED = {
    "one process": ("--processes", "1"),
    "two processes": ("--processes", "2"),
    "two processes, FSDP2": ("--processes", "2", "backend=fsdp"),
    "two processes, LoRA": ("--processes", "2", "model.lora.rank=16"),
}
PHASES = ("rollout", "score", "update", "push")
REAL_STEPS = 3  # of which the first is left out


def pretrained(folder: Path) -> dict[str, float]:
    """Measures the seconds per step and phase, and the peak memory, of SmolLM2-135M-Instruct in
    float32: 16 prompts x 8 completions of up to 24 tokens, two optimizer steps, no KL. The model
    and the tasks are those of `make demo-real`.

    Returns an empty dict without TRL.
    """
    python, made = os.environ.get(PYTHON, ""), ROOT / "runs" / "demo_real"
    if not python or not (made / "model").is_dir():
        sys.stderr.write(f"this needs {PYTHON} and {made}/model, which make demo-real makes\n")
        return {}
    found: dict[str, float] = {}
    for name, options in PRETRAINED.items():
        output = folder / name.replace(" ", "_")
        command = (sys.executable, "train_rl.py", ROOT / "examples/smollm/grpo.yaml", *options)
        own = (f"model.path={made / 'model'}", f"data.train={made / 'data/train.jsonl'}")
        more = (
            "data.eval=",
            "trainer.eval_every=0",
            "trainer.export=false",
            f"trainer.steps={REAL_STEPS}",
        )
        found[f"{name}: peak_gib"] = _peak_gib(*command, *own, *more, f"trainer.output={output}")
        lines = (output / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines][-REAL_STEPS + 1 :]
        for phase in PHASES:
            seconds = [each[f"seconds_{phase}"] for each in steps]
            found[f"{name}: {phase}_seconds"] = statistics.median(seconds)
        whole = [sum(each[f"seconds_{phase}"] for phase in PHASES) for each in steps]
        found[f"{name}: seconds"] = statistics.median(whole)
    given = {
        "model": str(made / "model"),
        "data": str(made / "data/train.jsonl"),
        "label": "answer",
        "pattern": r"-?\d+",
        "steps": REAL_STEPS,
        "prompts": 16,
        "samples": 8,
        "tokens": 24,
        "kl": 0.0,
        "learning_rate": 5e-6,
        "engine": "transformers",
    }
    told = trl_steps(python, given, dict(os.environ))
    found["TRL: seconds"] = statistics.median(told["seconds"][1:])
    for phase, seconds in told["phases"].items():
        found[f"TRL: {phase}_seconds"] = statistics.median(seconds[1:])
    found["TRL: peak_gib"] = told["peak_gib"]
    for name in PRETRAINED:
        found[f"{name}: times_as_fast"] = found["TRL: seconds"] / found[f"{name}: seconds"]
    return found


def _peak_gib(*command: object) -> float:
    """Runs a command and returns the largest sum of its processes' resident memory, in GiB; memory
    that processes share counts once for each.
    """
    process = psutil.Popen([str(part) for part in command], cwd=ROOT)
    most = 0
    while process.poll() is None:
        total = 0
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
        most = max(most, total)
        time.sleep(0.5)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return most / 2**30


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
