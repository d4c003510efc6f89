"""One checkpoint that is being written beside the training."""

import logging
import os
import threading
import time
from collections.abc import Callable

from rftmega.runtime.parallel import collectives, preemption
from rftmega.runtime.parallel.watchdog import mark

log = logging.getLogger(__name__)
NICE = 10  # the training goes first
ROUND = 1.0  # seconds


class Beside(threading.Thread):
    """Work in a thread of its own, which ends with the process; `error` says afterwards what went
    wrong.
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
        except Exception as error:  # whatever it is, it is told where somebody waits
            self.error = f"{type(error).__name__}: {error}"
        finally:
            del self.work  # it may hold gigabytes, and this stays until the next save


class BackgroundWriter:
    """This process's part of a checkpoint and, on the first one, the whole, which waits for all
    parts.
    """

    def __init__(
        self,
        part: Callable[[Callable[[float], object]], object],
        whole: Callable[[Callable[[], bool]], object] | None,
    ):
        """`part` is given a function that rests for so many seconds, or until somebody waits;
        `whole`, which the other processes don't have, one that says whether to give up.
        """
        self._given_up, self._awaited = threading.Event(), threading.Event()
        self._part = Beside(lambda: part(self._rest))
        self._whole = None if whole is None else Beside(lambda: whole(self._given_up.is_set))

    def _rest(self, seconds: float) -> None:
        """Rests; a request to stop ends that, too: another save comes, and waits for this one."""
        end = time.monotonic() + seconds
        while (
            (left := end - time.monotonic()) > 0
            and not self._awaited.wait(min(left, ROUND))
            and not preemption.asked()
        ):
            pass

    def wait(self) -> list[str]:
        """Waits for the checkpoint and returns what went wrong, rank by rank, alike on all
        processes, which call it together.
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
    """Waits until it has ended on all processes.

    That they wait together is progress: a disk may take longer than the watch would.
    """
    waiting = 1
    while waiting:
        if work is not None:
            work.join(ROUND)
        waiting = int(collectives.all_reduce(int(work is not None and work.is_alive()), "max"))
        mark()
