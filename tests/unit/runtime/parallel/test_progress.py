"""The watch over a process's progress: what it takes for hung, and what not."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rftmega.runtime.parallel import watchdog
from rftmega.runtime.parallel.watchdog import HUNG, mark, watched

ROOT = Path(__file__).parents[4]


def test_a_process_without_progress_is_named_with_its_phase_and_its_stacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended: list[int] = []
    over = threading.Event()

    def hangs_here(code: int) -> None:
        ended.append(code)
        over.set()

    with watched(0.2, 3, end=hangs_here):
        mark("update")
        assert over.wait(30)
    said = capfd.readouterr().err
    assert ended == [HUNG]
    assert "[rank 3] hung: no progress" in said
    assert "in the phase update (faults.watchdog_seconds=0.2)" in said
    assert "in test_a_process_without_progress_is_named" in said  # the main thread's stack
    assert said.lower().count("thread 0x") >= 2  # the watch itself, at least


def test_marks_from_any_thread_keep_a_process_alive_and_a_clock_that_jumps_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each read of a clock finds it a day later: the watch takes a round for no longer than it
    planned it.
    """
    real, reads = time.monotonic, iter(range(10**6))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: real() + 86400 * next(reads))
    monkeypatch.setattr(time, "time", lambda: 86400.0 * next(reads))
    ended: list[int] = []
    with watched(2.0, 0, end=ended.append):
        for _ in range(4):
            threading.Thread(target=mark).start()
            threading.Event().wait(0.2)
    assert ended == []


class Rounds:
    """An event that never comes: `count` waits of the watch, each a day long by the clock, in which
    `work` is done.
    """

    def __init__(self, count: int, work: Callable[[], None], monkeypatch: pytest.MonkeyPatch):
        self.left, self.work, self.now = count, work, 0.0
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)

    def wait(self, pause: float) -> bool:
        self.now, self.left = self.now + 86400, self.left - 1
        self.work()
        return self.left < 0


@pytest.mark.parametrize(
    ("count", "work", "ends"), [(100, mark, []), (4, int, []), (100, int, [HUNG])]
)
def test_rounds_without_a_mark_are_counted_and_a_mark_begins_anew(
    count: int, work: Callable[[], None], ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    watchdog._watch(10.0, 0, Rounds(count, work, monkeypatch), ended.append)  # type: ignore[arg-type]
    assert ended == ends


def test_a_process_whose_interpreter_is_held_ends_too() -> None:
    """A C call that never gives the interpreter up: no Python thread can run, the watch included."""
    program = """
import ctypes
from rftmega.runtime.parallel.watchdog import watched
with watched(0.2, 0):
    ctypes.PyDLL(None).sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in <module>" in done.stderr


def test_zero_watches_nothing() -> None:
    before = threading.active_count()
    with watched(0, 0):
        assert threading.active_count() == before
