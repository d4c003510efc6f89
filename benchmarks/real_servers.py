"""Compares asynchronous with synchronous training on a real vLLM server: the trainer on one core,
the server on another, completions of lognormal lengths.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.long_tail_environment import ASKED
from tests.e2e.conftest import ROOT, write_arithmetic

STEPS, FIRST = 40, 5  # the first ones are not counted
PLUGIN = Path(__file__).parent / "long_tail_environment.py"
OPTIONS = (
    *("strategy=separate", "rollout.engine=vllm", "rollout.cpu_cache_gib=0.1", "data.eval="),
    *("rollout.max_batch=64", "rollout.max_response_tokens=192", "environment.type=long_tail"),
    *("trainer.prompts_per_step=16", f"trainer.steps={STEPS}", "algorithm.kl.coef=0"),
    *("algorithm.updates_per_epoch=1", "trainer.max_tokens_per_micro_batch=512"),
    *("algorithm.importance_sampling=token", "model.dtype=float32", f"plugins=[{PLUGIN}]"),
)


def against_synchronous(folder: Path) -> dict[str, float]:
    """Returns the speedup over synchronous steps, and idle times."""
    write_arithmetic(folder)
    found: dict[str, float] = {}
    plain = 0.0
    for name, *options in (
        ("synchronous",),
        ("one ahead", "trainer.max_staleness=1", "rollout.ahead=1"),
        ("staleness 1", "trainer.max_staleness=1"),
        ("staleness 2", "trainer.max_staleness=2"),
        ("staleness 4", "trainer.max_staleness=4"),
    ):
        seen = measured(folder, name, options)
        plain = plain or seen["seconds"]
        found[f"{name}: times as fast"] = plain / seen["seconds"]
        found |= {f"{name}: {what}": value for what, value in seen.items()}
    return found


def measured(folder: Path, name: str, options: list[str]) -> dict[str, float]:
    """Runs the program once. Returns the mean step time, and the shares of it in which the trainer
    and the engine are idle.
    """
    output = folder / name.replace(" ", "-")
    command = [sys.executable, str(ROOT / "train_rl.py"), str(folder / "run.yaml"), *OPTIONS]
    command += [*options, f"trainer.output={output}", "--processes", "1"]
    cores = sorted(os.sched_getaffinity(0))
    asked = folder / f"{output.name}.asked"
    environment = {**os.environ, ASKED: str(asked)}
    with (folder / f"{output.name}.log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        os.sched_setaffinity(run.pid, {cores[0]})
        while run.poll() is None:
            time.sleep(0.1)
            keep_on(cores[-1], server_processes(run.pid))
    if run.returncode:
        raise RuntimeError(f"{name} ended with {run.returncode}; see {log.name}")
    counted = [line for line in lines(output) if line["step"] > FIRST]
    step = statistics.mean(seconds_of_step(line) for line in counted)
    waited = statistics.mean(
        line["seconds_rollout"] + line.get("seconds_join", 0.0) for line in counted
    )
    return {
        "seconds": step,
        "trainer idle": waited / step,
        "engine idle": idle_share(asked, counted[0]["time"], counted[-1]["time"]),
        "staleness": statistics.mean(line.get("staleness", 0.0) for line in counted),
        "dropped": sum(line.get("groups_dropped", 0.0) for line in counted),
    }


def keep_on(core: int, processes: list[psutil.Process]) -> None:
    """Pins all threads of these processes to one core."""
    for process in processes:
        with suppress(psutil.Error, OSError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def seconds_of_step(line: dict[str, float]) -> float:
    return sum(value for name, value in line.items() if name.startswith("seconds_"))


def lines(output: Path) -> list[dict[str, float]]:
    """Returns the metrics of the steps so far."""
    metrics = output / "metrics.jsonl"
    if not metrics.exists():
        return []
    found = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return [line for line in found if "loss" in line]


def server_processes(trainer: int) -> list[psutil.Process]:
    """Returns the processes of vLLM's server."""
    try:
        children = psutil.Process(trainer).children(recursive=True)
        return [each for each in children if "vllm" in " ".join(each.cmdline()).lower()]
    except psutil.Error:
        return []


def idle_share(asked: Path, begin: float, end: float) -> float:
    """Returns the share of the time from `begin` to `end` without a pending request to
    the server.
    """
    idle, since, now = 0.0, begin, 0
    for line in asked.read_text().splitlines():
        moment, number = line.split()
        until = min(max(float(moment), begin), end)
        if not now:
            idle += until - since
        since, now = until, int(number)
    return (idle + (0.0 if now else end - since)) / (end - begin)
