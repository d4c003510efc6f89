"""A rank that stands still is named in the log, with the place where it stands; its peers, which
wait for it, are not.
"""

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.runtime.parallel import lease, preemption
from rftmega.runtime.parallel.lease import Lease, Sign
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.watchdog import mark
from tests.ranks import run_ranks


def reads_a_slow_disk(named: Path) -> None:
    deadline = time.monotonic() + 60
    while not named.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


def standing_body(world: World, folder: Path) -> list[str]:
    """Rank 1 stands still until it is named, and rank 0 waits for it in a collective; then rank 1's
    process is stopped.
    """
    said: list[str] = []

    def listen(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        if "rank 1 on" in said[-1]:
            (folder / "named").touch()

    handler = logging.Handler()
    handler.emit = listen  # type: ignore[method-assign]
    lease.log.addHandler(handler)
    preemption.meet(dist.FileStore(str(folder / "board"), 2))
    with lease.named(world, limit=0.5, pause=0.05):
        mark("update")
        if world.rank == 1:
            reads_a_slow_disk(folder / "named")
        pids: list[Any] = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            wait_until(lambda: any("gave no sign of life" in line for line in said))
            os.kill(pids[1], signal.SIGCONT)
        dist.barrier()
    preemption.meet(None)
    return said


def test_a_rank_that_stands_still_or_is_stopped_is_named(tmp_path: Path) -> None:
    said, nothing = run_ranks(2, standing_body, tmp_path)
    (still, *_), (stopped, *_) = (
        [line for line in said if what in line] for what in ("reads_a_slow_disk", "sign of life")
    )
    assert f"rank 1 on {os.uname().nodename} stands still, no progress for" in still
    assert f"in the phase update, at {__file__}:" in still
    assert "rank 1 on" in stopped and "its process or its host is stopped, or gone" in stopped
    assert nothing == [], "the first process speaks for all"


# seconds since a mark; in a collective
WORKS, WAITS, STANDS = (5.0, False), (200.0, True), (190.0, False)


@pytest.mark.parametrize(
    ("signs", "named"),
    [
        ([WAITS, WORKS, WAITS], []),  # a long rollout of rank 1, for which the others wait
        ([WAITS, STANDS, WAITS], [1]),
        ([STANDS, WAITS, STANDS], [0, 2]),
        ([WAITS, WAITS, WAITS], [0, 1, 2]),  # a collective that hangs
    ],
)
def test_only_where_nobody_gets_on_somebody_is_named(
    signs: list[tuple[float, bool]], named: list[int]
) -> None:
    board = dist.HashStore()
    first = Lease(0, len(signs), board)
    for rank, (idle, waits) in enumerate(signs):
        board.set(
            lease._key(rank),
            json.dumps(asdict(Sign(1, idle, "update", "node07", "forward.py:12 (f)", waits))),
        )
    said = first.look()
    assert [
        rank for rank in range(len(signs)) if f"rank {rank} on node07 stands still" in said
    ] == named
    assert first.look() == "", "once, until it is twice as long"


def test_a_process_alone_is_named_and_not_after_it_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, now = Lease(0, 1, None), time.monotonic()
    mark("push")
    told = {}
    for later in (50, 61, 100, 130, 200, 280):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        alone.tell()
        told[later] = alone.look()
    assert [later for later, line in told.items() if line] == [61, 130, 280]
    assert "stands still, no progress for 61 s in the phase push" in told[61]
    mark()
    alone.tell()
    assert alone.look() == ""


def test_an_engine_that_compiles_as_the_run_starts_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, now = Lease(0, 1, None), time.monotonic()
    mark("start")
    told = {}
    for later in (61, 290, 301):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        alone.tell()
        told[later] = alone.look()
    assert [later for later, line in told.items() if line] == [301]
