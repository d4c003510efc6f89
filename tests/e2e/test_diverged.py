"""A run whose weights have exploded ends with a code of its own, and leaves the earlier export
alone.
"""

from pathlib import Path

import pytest

from rftmega.core.errors import Diverged
from tests.e2e.conftest import Run, metrics_of


@pytest.mark.ranks
def test_a_run_that_takes_no_more_optimizer_steps_ends_with_its_own_code(
    arithmetic: Path, tmp_path: Path, train: Run
) -> None:
    options = [
        "optimizer.learning_rate=1e30",
        "faults.max_skipped_steps=2",
        "trainer.steps=9",
        "data.eval=",
        "trainer.export=true",
    ]
    done = train(
        arithmetic / "run.yaml", f"trainer.output={tmp_path}", *options, "--processes", "2"
    )
    assert done.returncode == Diverged.exit_code, done.stderr
    assert "took no optimizer step in the last 2 steps, up to step 3" in done.stderr
    assert "Traceback" not in done.stderr
    steps = metrics_of(tmp_path)[1:]
    assert [(step["optimizer_steps"], step["skipped_steps"]) for step in steps][1:] == [
        (0, 2),
        (0, 2),
    ]
    assert not (tmp_path / "policy").exists(), "what has diverged is not exported"
