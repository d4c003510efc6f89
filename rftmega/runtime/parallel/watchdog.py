"""Records this process's progress, and ends a process that hangs.

Working code calls `mark`: at each phase, micro-batch, bucket of a weight push, and completion.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HUNG = 86  # exit code


class Seen:
    """Seen holds this process's current phase, how often it called `mark`, and the time of the last
    call.
    """

    def __init__(self) -> None:
        self.phase, self.marks, self.at = "start", 0, time.monotonic()


seen = Seen()


def mark(phase: str | None = None) -> None:
    """Records that this process made progress; `phase` names the phase that begins, if one does.
    Callable from any thread.
    """
    seen.phase, seen.marks, seen.at = phase or seen.phase, seen.marks + 1, time.monotonic()


@contextmanager
def watched(seconds: float, rank: int, *, end: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Watches a `with` block: if this process does not call `mark` for `seconds`, writes rank,
    phase and the stacks of all threads to stderr, and ends the process with exit code HUNG.

    `seconds=0` disables the watch; `end` is called with the exit code to end the process. Idle time
    is the sum of the watching thread's rounds, each counted with at most its planned length, so
    that neither a clock that jumps nor a process that was stopped for a while counts as hung.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(seconds, rank, over, end), daemon=True, name="watchdog"
    )
    mark()
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(seconds: float, rank: int, over: threading.Event, end: Callable[[int], None]) -> None:
    pause, marks, idle = min(1.0, seconds / 10), seen.marks, 0.0
    while True:
        # If a thread holds the interpreter, this one gets no turn; faulthandler's needs none. It
        # knows no phase, and counts the time for which a process was stopped.
        faulthandler.dump_traceback_later(10 * seconds, exit=True)
        begin = time.monotonic()
        if over.wait(pause):
            return
        idle += min(time.monotonic() - begin, 2 * pause)
        if seen.marks != marks:
            marks, idle = seen.marks, 0.0
        if idle > seconds:
            _report(rank, idle, seconds)
            end(HUNG)
            return


def _report(rank: int, idle: float, seconds: float) -> None:
    sys.stderr.write(
        f"[rank {rank}] hung: no progress for {idle:.0f} s in the phase {seen.phase} (faults.watchdog_seconds={seconds:g}). "
        "Its threads:\n"
    )
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
