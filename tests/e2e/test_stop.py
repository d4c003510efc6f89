"""Runs that are asked to stop, that hang, or that lose a rank: saved, ended or started again, and
gone on with.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Run, metrics_of
from tests.e2e.test_faults import assert_gone, ranks_of

TRAIN = [sys.executable, str(ROOT / "train_rl.py")]
WAITS_AT_AN_IMPORT = """
import runpy, sys

class Finder:
    def find_spec(self, name, *more):
        if name == "rftmega.config":
            print("imports", flush=True)
            sys.stdin.readline()

sys.meta_path.insert(0, Finder())
runpy.run_path("train_rl.py", run_name="__main__")
"""


@contextmanager
def running(
    command: list[str], config: Path, output: Path, *options: str, lines: int = 3
) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that saves every step, when `lines` of its metrics are there."""
    process = subprocess.Popen(
        [*command, str(config), "checkpoint.every=1", f"trainer.output={output}", *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    metrics = output / "metrics.jsonl"
    try:
        while not (metrics.is_file() and metrics.read_text().count("\n") > lines):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "training did not start"
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.ranks
def test_a_signal_to_any_rank_saves_and_ends_all_with_the_code_to_start_again(
    arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    output = tmp_path / "out"
    options = [
        "--processes",
        "2",
        "parallel.pipeline=2",
        "trainer.steps=100000",
        "faults.requeue_code=77",
    ]
    with running(TRAIN, arithmetic / "run.yaml", output, *options) as process:
        ranks = ranks_of(process)
        ranks[random.randrange(2)].send_signal(random.choice([signal.SIGTERM, signal.SIGUSR1]))
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 77, errors
    assert_gone(ranks)
    last = metrics_of(output)[-1]["step"]
    done = train(
        arithmetic / "run.yaml",
        f"trainer.output={output}",
        "checkpoint.every=1",
        f"trainer.steps={last + 1}",
        *options[:3],
    )
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics_of(output)] == list(range(last + 2))


@pytest.mark.ranks
def test_the_launcher_passes_a_signal_on(arithmetic: Path, tmp_path: Path) -> None:
    with running(
        TRAIN, arithmetic / "run.yaml", tmp_path / "out", "--processes", "2", "trainer.steps=100000"
    ) as process:
        ranks = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    assert_gone(ranks)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param(["checkpoint.every=5"], 75, id="a process alone", marks=pytest.mark.ranks),
        pytest.param(["checkpoint.every=5", "--processes", "2"], 75, id="a launcher"),
        pytest.param(["checkpoint.every=0"], -signal.SIGUSR1, id="nothing is saved"),
    ],
)
def test_a_signal_that_comes_while_a_run_starts_is_a_request_where_it_saves(
    options: list[str], code: int, arithmetic: Path, tmp_path: Path
) -> None:
    """It comes before anything is imported that takes time.

    Nothing was done, so nothing is saved.
    """
    output = tmp_path / "out"
    arguments = [
        str(arithmetic / "run.yaml"),
        f"trainer.output={output}",
        "trainer.steps=100000",
        *options,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS_AT_AN_IMPORT, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "imports\n"
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate("go on\n", timeout=120)
    assert process.returncode == code, errors
    assert not (output / "checkpoints/latest").is_file()


@pytest.mark.ranks
def test_a_rank_that_hangs_is_ended_by_its_peers_watchdog_and_the_run_starts_again(
    arithmetic: Path, tmp_path: Path
) -> None:
    """Stopped, it can't watch itself."""
    output = tmp_path / "out"
    options = [
        "--processes",
        "2",
        "trainer.steps=60",
        "faults.watchdog_seconds=15",
        "faults.max_restarts=1",
    ]
    with running(TRAIN, arithmetic / "run.yaml", output, *options) as process:
        ranks_of(process)[1].suspend()
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "[rank 0] hung: no progress for" in errors
    assert "rank 0" in errors and "exited with 86 (it hung)" in errors
    assert [line["step"] for line in metrics_of(output)] == list(range(61))


@pytest.mark.ranks
def test_torchruns_own_restarts_go_on_from_the_latest_checkpoint(
    arithmetic: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0", str(ROOT / "train_rl.py")]  # fmt: skip
    with running(torchrun, arithmetic / "run.yaml", output, "trainer.steps=60") as process:
        import psutil

        workers = [
            p
            for p in psutil.Process(process.pid).children()
            if "train_rl.py" in " ".join(p.cmdline())
        ]
        workers[1].kill()
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert [line["step"] for line in metrics_of(output)] == list(range(61))
