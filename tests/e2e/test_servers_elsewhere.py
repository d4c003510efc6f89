"""An asynchronous run with servers of somebody else's: trainer and server are killed, and nothing is
lost or learnt twice.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftmega.rollout.servers.vllm import auth
from tests.e2e.conftest import ROOT, metrics_of

STEPS, STALENESS = 10, 2
OPTIONS = [
    "strategy=separate", "rollout.engine=vllm", "rollout.transport=network", "rollout.cpu_cache_gib=0.05", "rollout.max_batch=8",
    f"trainer.max_staleness={STALENESS}", f"trainer.steps={STEPS}", "trainer.prompts_per_step=4", "checkpoint.every=2",
    "data.eval=", "algorithm.importance_sampling=token", "parallel.pipeline=2", "model.dtype=float32",
]  # fmt: skip
PATIENCE = 400  # seconds


@pytest.fixture
def serving(arithmetic: Path, tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Runs `rftmega serve`, which starts a server again that ends."""
    command = [sys.executable, "-m", "rftmega", "serve", str(arithmetic / "run.yaml"), *OPTIONS]
    command += ["--listen", "127.0.0.1", "--server-list", str(tmp_path / "server_list")]
    command += ["--logs", str(tmp_path / "servers")]
    with (tmp_path / "serve.log").open("w") as said:
        process = subprocess.Popen(
            command, env=os.environ | {auth.KEY: "of this test"}, stdout=said, stderr=said
        )
    yield process
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def trainer(arithmetic: Path, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "train_rl.py"), str(arithmetic / "run.yaml")]
    command += ["--processes", "2", *OPTIONS, f"rollout.server_list={folder / 'server_list'}"]
    command.append(f"trainer.output={folder / 'out'}")
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env=os.environ | {auth.KEY: "of this test"},
    )


def until_step(step: int, output: Path, process: "subprocess.Popen[str]") -> None:
    metrics, end = output / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (metrics.is_file() and metrics.read_text().count("\n") > step):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"step {step} did not come"
        time.sleep(0.1)


def kill_server(serving: "subprocess.Popen[bytes]") -> None:
    (server, *_) = psutil.Process(serving.pid).children()
    for child in (*server.children(recursive=True), server):
        child.kill()


@pytest.mark.ranks
def test_each_group_is_trained_at_most_once_over_kills_of_trainer_and_server(
    serving: Any, arithmetic: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    first = trainer(arithmetic, tmp_path)
    until_step(3, output, first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = trainer(arithmetic, tmp_path)
    until_step(6, output, second)
    kill_server(serving)
    said, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, said
    assert "resumed from" in said and "is asked nothing more" in said, said
    steps = [json.loads(line) for line in (output / "trained_order.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    trained = [number for step in steps for wait in step["taken"] for number in wait]
    dropped = [number for step in steps for number in step["dropped"]]
    assert len({*trained, *dropped}) == len(trained) + len(dropped), "a group ended twice"
    assert len(trained) == 4 * STEPS
    under_way = {*range(max(trained + dropped) + 1)} - {*trained, *dropped}
    assert len(under_way) <= 4 * (STALENESS + 1), "groups were lost"
    for step in steps:
        versions = [version for wait in step["versions"] for group in wait for version in group]
        assert step["step"] - 1 - STALENESS <= min(versions) <= max(versions) < step["step"]
    for line in metrics_of(output)[1:]:
        assert line["staleness_max"] <= STALENESS and line["logprob_gap_max"] < 1e-4
