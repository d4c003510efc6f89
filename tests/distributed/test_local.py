"""The launcher of `--processes`: whichever rank fails, its user hears why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftmega.errors import ConfigError, RFTMegaError
from rftmega.parallel.local import launch

ROOT = Path(__file__).parents[2]


def fails(rank: str, kind: str) -> None:
    if os.environ["RANK"] == rank:
        if kind == "user":
            raise ConfigError("choose another")
        raise ValueError("boom")


def works() -> None:
    sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")


def launched(call: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: ranks write where the server that they are forked from was started to write."""
    program = f"import sys\nfrom rftmega.parallel.local import launch\nfrom {__name__} import *\nsys.exit({call})"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)


def test_every_rank_works_and_the_code_is_zero() -> None:
    done = launched("launch(3, works, preload=[])")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-3:] == [f"rank {rank} of 3" for rank in range(3)]


@pytest.mark.parametrize("rank", ["0", "2"])
def test_what_the_user_can_mend_is_raised_here_whichever_rank_found_it(rank: str) -> None:
    with pytest.raises(RFTMegaError, match="choose another"):
        launch(3, fails, rank, "user", preload=[])


def test_anything_else_is_a_traceback_with_the_rank_before_it() -> None:
    done = launched("launch(3, fails, '1', 'bug', preload=[])")
    assert done.returncode == 1
    assert "[rank 1] ValueError: boom" in done.stderr
    assert "error: rank 1 (pid" in done.stderr
    assert "exited with 1" in done.stderr
