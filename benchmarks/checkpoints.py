"""Measures saving and loading the training state of 200 million parameters: concurrently with
training, and against `dd` on the same disk.
"""

import os
import re
import shutil
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import save_model
from benchmarks.timing import seconds
from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.backends.megatron.training_state import set_adam_steps
from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.trainer.experience import given
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks

SHAPE = {
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
}
ROUNDS = 3


def beside_body(world: Any, model: Path, folder: Path) -> dict[str, float]:
    actor = build_actor(
        model, ParallelConfig(), OptimizerConfig(learning_rate=1e-5), token_cap=2048
    )
    experience = given(rows_of([[(7 * row + i) % 4000 for i in range(64)] for row in range(2)]))

    def step() -> None:
        actor.step(experience, cross_entropy_loss())

    kept = TrainingCheckpoints(
        folder, {"policy": actor}, actor.manager.cfg, keep=1, asynchronous=True
    )
    step()
    kept.save({}, step=0)  # allocates the memory of snapshots
    kept.wait()
    beside, pauses, counts = [], [], []
    for number in range(1, ROUNDS + 1):
        plain = [seconds(step) for _ in range(4)]
        begin, steps = time.perf_counter(), 0
        kept.save({}, step=number)
        pauses.append(time.perf_counter() - begin)
        while not (folder / f"step_{number:06d}").exists():
            step()
            steps += 1
        beside.append((time.perf_counter() - begin) / steps / statistics.median(plain))
        counts.append(steps)
        kept.wait()
    return {
        "parameters_millions": actor.manager.description.parameters / 1e6,
        "step_seconds": statistics.median(plain),
        "pause_seconds": statistics.median(pauses),
        "steps_beside": statistics.median(counts),
        "steps_beside_over_plain": statistics.median(beside),
    }


def speed_body(world: Any, model: Path, folder: Path) -> dict[str, float]:
    """Compares blocking saves and loads from disk, alternating, with `dd`, which bypasses the page
    cache; its source is in memory, like that of a save.
    """
    actor = build_actor(model, ParallelConfig(), OptimizerConfig(learning_rate=1e-5))
    set_adam_steps(actor.manager, 1)
    kept = TrainingCheckpoints(folder, {"policy": actor}, actor.manager.cfg, keep=1)
    kept.save({}, step=0)  # allocates the memory of snapshots
    found: dict[str, list[float]] = {"save": [], "load": []}
    for number in range(10, 10 + ROUNDS):
        name = f"step_{number:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        save = seconds(partial(kept.save, {}, step=number))
        data = folder / name / "__0_0.distcp"
        size = data.stat().st_size
        remember(data)
        found["save"].append(
            size / save / dd(f"if={data}", f"of={folder}/dd", "oflag=direct", "conv=fsync")
        )
        (folder / "dd").unlink()
        forget(data)
        load = seconds(partial(kept.load, folder / name))
        forget(data)
        found["load"].append(size / load / dd(f"if={data}", "of=/dev/null", "iflag=direct"))
    ratios = {f"{what}_over_dd": statistics.median(values) for what, values in found.items()}
    return {
        "gigabytes": size / 1e9,
        "save_seconds": save,
        "load_seconds": load,
        **ratios,
        "slower_over_dd": min(ratios.values()),
    }


def remember(path: Path) -> None:
    """Reads the file into the page cache."""
    with path.open("rb") as stream:
        while stream.read(2**24):
            pass


def forget(path: Path) -> None:
    """Drops the file from the page cache."""
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(*arguments: str) -> float:
    """Runs `dd` and returns its bytes per second."""
    said = subprocess.run(
        ["dd", "bs=16M", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={"LC_ALL": "C"},
    ).stderr
    copied = re.search(r"(\d+) bytes .* copied, ([\d.e+-]+) s", said)
    assert copied, said
    return int(copied[1]) / float(copied[2])


def beside(folder: Path) -> dict[str, float]:
    return run_ranks(
        1, beside_body, save_model(folder / "model", **SHAPE), folder / "kept", timeout=900
    )[0]


def speeds(folder: Path) -> dict[str, float]:
    return run_ranks(
        1, speed_body, save_model(folder / "model", **SHAPE), folder / "kept", timeout=900
    )[0]
