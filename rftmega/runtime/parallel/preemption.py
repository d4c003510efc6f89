"""Handles preemption: SIGTERM or SIGUSR1 to any process of the run, or to its launcher, requests
the whole run to stop.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ASKED = "asked to stop"
LOOK = 1.0  # seconds between two checks of the store `board`


class StopRequest:
    """StopRequest records whether this process was asked to stop.

    `file`: path of a file that a launcher creates to forward the request to its ranks.
    """

    came = 0  # the signal's number
    file: Path | None = None
    # store of torch.distributed, in which the processes of the run exchange requests
    board: Any = None
    known = False  # the request is in the store
    looked = 0.0  # time of the last check of the store


request = StopRequest()


def listen() -> None:
    """Installs handlers that turn SIGTERM and SIGUSR1 into stop requests.

    To be called in the main thread of a process before its other imports, which take seconds: until
    then a signal would end the process.
    """
    for number in SIGNALS:
        signal.signal(number, _note)


def listens() -> bool:
    """Returns whether the signal handlers of `listen` are installed."""
    return all(signal.getsignal(number) is _note for number in SIGNALS)


def unlisten() -> None:
    """Restores the default action of SIGTERM and SIGUSR1, which ends this process at once, and
    raises again a signal that was already received.

    For runs that save nothing: they can't be resumed, so there is nothing to do before the end.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if request.came:
        signal.raise_signal(request.came)


def _note(number: int, frame: Any) -> None:
    request.came = number


@contextmanager
def listening() -> Iterator[None]:
    """Turns SIGTERM and SIGUSR1 into stop requests within a `with` block, and restores the previous
    handlers afterwards.

    A request is forgotten at the end of the block, so that it does not stop the next run in this
    process, unless the handlers of `listen` were installed before. Works in the main thread only.
    """
    before = {number: signal.signal(number, _note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if not listens():
            request.came = 0


def meet(board: Any) -> None:
    """Sets the store of torch.distributed through which the processes of a run exchange stop
    requests; None: this process exchanges none.
    """
    request.board, request.known = board, False


def asked() -> bool:
    """Returns whether this process, its launcher or another process of the run was asked to stop;
    another process's request is seen within about LOOK seconds.
    Not a collective: call it at any time, from any thread.
    """
    own = bool(request.came) or (request.file is not None and request.file.exists())
    if request.board is None or request.known:
        return own or request.known
    if own or time.monotonic() - request.looked >= LOOK:
        request.looked = time.monotonic()
        # the store's server has ended; its launcher reports why
        with suppress(RuntimeError):
            if own:
                request.board.set(ASKED, "")
            request.known = own or request.board.check([ASKED])
    return own or request.known


def agreed(group: Any = None) -> bool:
    """Returns whether any process of the group (None: all processes) was asked to stop; a
    collective, with the same result on all of them.
    """
    from rftmega.runtime.parallel.collectives import (
        gather_objects,  # imported late: torch would delay `listen`
    )

    return any(gather_objects(asked(), group))
