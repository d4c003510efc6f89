"""Handles graceful preemption: SIGTERM or SIGUSR1, in any process of the run or its launcher, asks
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
LOOK = 1.0  # seconds between two looks at the board


class StopRequest:
    """StopRequest records whether this process was asked to stop.

    A launcher that tells its ranks creates `file` once asked.
    """

    came = 0  # the signal's number
    file: Path | None = None
    # store of torch.distributed, in which the processes of the run exchange requests
    board: Any = None
    known = False  # the request is at the board
    looked = 0.0  # time of the last look at the board


request = StopRequest()


def listen() -> None:
    """Turns the signals into stop requests.

    A process of a run calls it first, in its main thread: its imports take seconds, and an
    unhandled signal ends it.
    """
    for number in SIGNALS:
        signal.signal(number, _note)


def listens() -> bool:
    """Returns whether the handlers of `listen` are installed."""
    return all(signal.getsignal(number) is _note for number in SIGNALS)


def unlisten() -> None:
    """Restores the signals' default action, which ends this process at once, also for a signal that
    came already.

    A run that saves nothing can't be resumed.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if request.came:
        signal.raise_signal(request.came)


def _note(number: int, frame: Any) -> None:
    request.came = number


@contextmanager
def listening() -> Iterator[None]:
    """Turns the signals into stop requests within a `with` block, whatever their handlers were
    before.

    Another run in this process does not get these requests, unless `listen` was called. In the main
    thread.
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
    """Sets the store of torch.distributed in which processes exchange requests; None: no longer."""
    request.board, request.known = board, False


def asked() -> bool:
    """Returns whether this process or its launcher was asked to stop or, some LOOK seconds later,
    another process of the run.

    No collective: call it at any time, from any thread.
    """
    own = bool(request.came) or (request.file is not None and request.file.exists())
    if request.board is None or request.known:
        return own or request.known
    if own or time.monotonic() - request.looked >= LOOK:
        request.looked = time.monotonic()
        # the board's server has ended; its launcher reports why
        with suppress(RuntimeError):
            if own:
                request.board.set(ASKED, "")
            request.known = own or request.board.check([ASKED])
    return own or request.known


def agreed(group: Any = None) -> bool:
    """Returns whether any process of the group (None: all) was asked to stop; a collective, with
    the same result on all.
    """
    from rftmega.runtime.parallel.collectives import (
        gather_objects,  # imported late: torch would delay `listen`
    )

    return any(gather_objects(asked(), group))
