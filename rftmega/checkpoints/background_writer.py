"""Writes one checkpoint in background threads while training continues."""

import logging
import os
import threading
import time
from collections.abc import Callable

from rftmega.runtime.parallel import collectives, preemption
from rftmega.runtime.parallel.watchdog import mark

log = logging.getLogger(__name__)
NICE = 10  # training has priority
ROUND = 1.0  # seconds


class Beside(threading.Thread):
    """Beside runs the function `work` in a low-priority daemon thread. After the thread has ended,
    `error` is the description of the exception that `work` raised, or None.
    """

    def __init__(self, work: Callable[[], object]):
        super().__init__(daemon=True)
        self.work = work
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            self.work()
        except Exception as error:  # any error: it is reported by `wait`
            self.error = f"{type(error).__name__}: {error}"
        finally:
            del self.work  # it may hold gigabytes, and this object lives until the next save


class BackgroundWriter:
    """BackgroundWriter writes this process's part of a checkpoint in a background thread. On the
    first process, a second thread completes the checkpoint once all processes have written their
    parts.
    """

    def __init__(
        self,
        part: Callable[[Callable[[float], object]], object],
        whole: Callable[[Callable[[], bool]], object] | None,
    ):
        """`part`: writes this process's files; it gets a function that sleeps for a number of
        seconds, or less if `wait` is called. `whole`, on the first process only (elsewhere None):
        completes the checkpoint; it gets a function that returns whether to give up.
        """
        self._given_up, self._awaited = threading.Event(), threading.Event()
        self._part = Beside(lambda: part(self._rest))
        self._whole = None if whole is None else Beside(lambda: whole(self._given_up.is_set))

    def _rest(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until `wait` is called or the run is asked to stop: the run then
        saves once more, and waits for this checkpoint first.
        """
        end = time.monotonic() + seconds
        while (
            (left := end - time.monotonic()) > 0
            and not self._awaited.wait(min(left, ROUND))
            and not preemption.asked()
        ):
            pass

    def wait(self) -> list[str]:
        """Waits until the checkpoint is written; a collective. Returns a list of the errors, each
        with its rank, that is the same on all processes; [] if there was no error.
        """
        self._awaited.set()
        _join(self._part)
        found = collectives.gather_objects(self._part.error)
        if any(found):
            self._given_up.set()
        _join(self._whole)
        if not any(found):
            found = collectives.gather_objects(self._whole.error if self._whole else None)
        return [f"rank {rank}: {error}" for rank, error in enumerate(found) if error]


def _join(work: Beside | None) -> None:
    """Waits until the thread `work` (None: no thread) has ended on all processes; a collective.

    Waiting together counts as progress for the watchdog, since a disk may take longer than the
    watchdog's limit.
    """
    waiting = 1
    while waiting:
        if work is not None:
            work.join(ROUND)
        waiting = int(collectives.all_reduce(int(work is not None and work.is_alive()), "max"))
        mark()
