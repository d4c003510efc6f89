"""Tests and runs that fail leave nothing behind: no process, no shared memory, no open port, no
file.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILING_TEST = """
import os
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

def raise_it(world):
    meet_and_fail(world, lambda: 1 / 0)

def kill_it(world):
    meet_and_fail(world, lambda: os.kill(os.getpid(), 9))

def meet_and_fail(world, fault):
    dist.all_reduce(torch.ones(1))
    if world.rank == world.size - 1:
        fault()
    dist.barrier()

def test_a_rank_that_raises():
    run_ranks({ranks}, raise_it)

def test_a_rank_that_is_killed():
    run_ranks({ranks}, kill_it)
"""
FAILING_RUN = """
import os, sys
from rftmega.run.local_launcher import launch
from tests.distributed.test_left_behind import broken_rank
if __name__ == "__main__":
    sys.exit(launch({ranks}, broken_rank, preload=["rftmega.runtime.parallel.process_group"]))
"""


def broken_rank() -> None:
    from rftmega.runtime.parallel import process_group

    with process_group.start() as world:
        if world.rank == world.size - 1:
            os.kill(os.getpid(), 9)
        import torch.distributed as dist

        dist.barrier()


def processes_of(session: int) -> list[str]:
    """Everything alive, or dead and not waited for, that was started in this session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(rest.split()[3]) == session:
            found.append(name + ")" + rest[:2])
    return found


def listening() -> set[str]:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return {line.split()[1] for table in tables for line in table if line.split()[3] == "0A"}


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def assert_nothing_left(command: list[str], folder: Path) -> str:
    """Runs it in a session and a folder for temporary files of its own; what it said."""
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "OMP_NUM_THREADS": "1",
    }
    before = shared_memory(), listening()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = process.communicate(timeout=180)
    assert process.returncode not in (0, None), said
    # the server that ranks were forked from ends by itself, a moment later
    deadline = time.monotonic() + 20
    while left := (processes_of(process.pid), shared_memory() - before[0], listening() - before[1]):
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert not any(left), left
    files = [
        path
        for path in temporary.rglob("*")
        if path.is_file() or path.name.startswith("torchelastic")
    ]
    assert not files, files
    return said


@pytest.mark.parametrize("ranks", [1, pytest.param(8, marks=pytest.mark.ranks)])
def test_after_tests_whose_rank_raises_and_is_killed(ranks: int, tmp_path: Path) -> None:
    test = tmp_path / "test_failing.py"
    test.write_text(FAILING_TEST.format(ranks=ranks))
    said = assert_nothing_left(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)], tmp_path
    )
    assert "2 failed" in said
    assert f"rank {ranks - 1} raised" in said
    assert "ZeroDivisionError" in said
    assert f"rank {ranks - 1} died" in said


def test_after_a_run_whose_rank_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "failing_run.py"
    program.write_text(FAILING_RUN.format(ranks=3))
    said = assert_nothing_left([sys.executable, str(program)], tmp_path)
    assert "rank 2" in said
    assert "SIGKILL" in said
