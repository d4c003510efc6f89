"""A full disk ends a run with the name of the file, or where the run may go on costs what there is no
room for, and nothing else. RLIMIT_FSIZE stands for it.
"""

import gzip
import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rftmega.config import RunConfig
from rftmega.core.errors import OutputError
from rftmega.monitoring.observers.assemble import writers
from rftmega.monitoring.observers.metric_writers import JSONLines
from rftmega.monitoring.observers.step_lines import StepLines
from rftmega.monitoring.observers.trained_order import TrainedOrder
from rftmega.monitoring.observers.trajectories import Trajectories
from rftmega.trainer.trained_order import TrainedGroups
from tests.unit.monitoring.observers import test_trajectories as made

ROOM = 200  # bytes


@contextmanager
def full() -> Iterator[None]:
    """Files of this process can't grow beyond ROOM within a `with` block."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)


def trainer(step: int) -> Any:
    schedule = SimpleNamespace(trained=TrainedGroups([[step] * 50], [], []))
    return SimpleNamespace(step=step, resumed=False, schedule=schedule)


LINES: dict[str, Callable[[Path, bool], StepLines]] = {
    "metrics.jsonl": lambda path, warn: JSONLines(path, warn=warn),
    "trained_order.jsonl": lambda path, warn: TrainedOrder(
        path, prompts_per_step=1, max_staleness=1, warn=warn
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_has_no_room_is_told_with_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    writer = LINES[name](path, False)
    writer.on_start(trainer(0), {})
    before = path.read_bytes()
    told = f"{path} can't be written: File too large. .*checkpoint.on_failure=warn"
    with full(), pytest.raises(OutputError, match=told):
        writer.on_step(trainer(1), {"a" * 200: 1.0})
    writer.on_end(None)
    assert path.read_bytes() == before, "half a line stays"


@pytest.mark.parametrize("name", LINES)
def test_a_run_that_may_go_on_loses_the_lines_without_room_alone(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    writer = LINES[name](path, True)
    writer.on_start(trainer(0), {})
    writer.on_step(trainer(1), {})
    with full():
        writer.on_step(trainer(2), {"a" * 200: 1.0})
        writer.on_save(trainer(2))
    writer.on_step(trainer(3), {})
    writer.on_end(None)
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert [step for step in steps if step] == [1, 3]
    assert f"{path} can't be written: File too large. The run goes on" in caplog.text


@pytest.mark.parametrize("warn", [False, True])
def test_trajectories_without_room_leave_no_half_file(
    warn: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples, experience = made.trained()
    observer = Trajectories(
        tmp_path / "out", made.text, made.letters, every=1, most_bytes=10**6, warn=warn
    )
    observer.on_start(SimpleNamespace(step=0, resumed=False), {})
    path = tmp_path / "out/step_000001.jsonl.gz"
    with full():
        if warn:
            observer.on_experience(SimpleNamespace(step=1), samples, experience)
        else:
            with pytest.raises(OutputError, match=f"{path} can't be written"):
                observer.on_experience(SimpleNamespace(step=1), samples, experience)
    assert list((tmp_path / "out").iterdir()) == []
    assert (f"{path} can't be written" in caplog.text) == warn
    observer.on_experience(SimpleNamespace(step=2), samples, experience)
    (whole,) = (tmp_path / "out").iterdir()
    assert gzip.decompress(whole.read_bytes()).count(b"\n") == len(samples)


@pytest.mark.parametrize("chosen", ["stop", "warn"])
def test_what_a_full_disk_does_is_what_checkpoint_on_failure_says(chosen: Any) -> None:
    config = RunConfig()
    config.checkpoint.on_failure = chosen
    found = [each for each in writers(config, []) if isinstance(each, StepLines)]
    assert [each.warn for each in found] == [chosen == "warn"]
