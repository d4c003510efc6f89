"""One checkpoint that is being written beside the training."""

import logging
import os
import threading
from collections.abc import Callable

from rftmega.parallel import collectives

log = logging.getLogger(__name__)
NICE = 10  # the training goes first


class Beside(threading.Thread):
    """Work in a thread of its own, which ends with the process; `error` says afterwards what went wrong."""

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


class Writing:
    """This process's part of a checkpoint and, on the first one, the whole, which waits for all parts."""

    def __init__(self, part: Callable[[], object], whole: Callable[[Callable[[], bool]], object] | None):
        """`whole` is given a function that says whether to give up; None on the other processes."""
        self._given_up = threading.Event()
        self._part = Beside(part)
        self._whole = None if whole is None else Beside(lambda: whole(self._given_up.is_set))

    def wait(self) -> list[str]:
        """What went wrong, rank by rank, alike on all processes, which call it together."""
        self._part.join()
        found = collectives.gather_objects(self._part.error)
        if any(found):
            self._given_up.set()
        if self._whole is not None:
            self._whole.join()
        if not any(found):
            found = collectives.gather_objects(self._whole.error if self._whole else None)
        return [f"rank {rank}: {error}" for rank, error in enumerate(found) if error]
