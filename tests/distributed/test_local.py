"""The launcher of `--processes`: whichever rank fails, its user hears why."""

import os
import sys

import pytest

from rftmega.errors import ConfigError, RFTMegaError
from rftmega.parallel.local import launch


def fails(rank: str, kind: str) -> None:
    if os.environ["RANK"] == rank:
        if kind == "user":
            raise ConfigError("choose another")
        raise ValueError("boom")


def works() -> None:
    sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")


def test_every_rank_works_and_the_code_is_zero(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(3, works, preload=[]) == 0
    assert sorted(capfd.readouterr().out.split("\n"))[-3:] == [f"rank {rank} of 3" for rank in range(3)]


@pytest.mark.parametrize("rank", ["0", "2"])
def test_what_the_user_can_mend_is_raised_here_whichever_rank_found_it(rank: str) -> None:
    with pytest.raises(RFTMegaError, match="choose another"):
        launch(3, fails, rank, "user", preload=[])


def test_anything_else_is_a_traceback_with_the_rank_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(3, fails, "1", "bug", preload=[]) == 1
    errors = capfd.readouterr().err
    assert "[rank 1] ValueError: boom" in errors
    assert "error: rank 1 (pid" in errors
    assert "exited with 1" in errors
