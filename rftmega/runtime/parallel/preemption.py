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
LOOK = 1.0  # seconds


class StopRequest:
    """StopRequest records whether this process was asked to stop.

    A launcher that tells its ranks creates `file` once asked.
    """

    came = 0  # the signal's number
    file: Path | None = None
    # a store of torch.distributed, where the processes of the run tell each other
    board: Any = None
    known = False  # at the board
    looked = 0.0  # when


request = StopRequest()


def listen() -> None:
    """Turns the signals into requests. The first thing that a process of a run does, in its main
    thread: its imports take seconds, and a signal that nobody listens for ends it.
    """
    for number in SIGNALS:
        signal.signal(number, _note)


def listens() -> bool:
    """Returns whether `listen` was called last."""
    return all(signal.getsignal(number) is _note for number in SIGNALS)


def unlisten() -> None:
    """Lets the signals end this process at once, one that came already, too: a run that saves
    nothing can't go on later.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if request.came:
        signal.raise_signal(request.came)


def _note(number: int, frame: Any) -> None:
    request.came = number


@contextmanager
def listening() -> Iterator[None]:
    """Turns the signals into requests within a `with` block, whatever they were outside. Another run
    in this process does not hear of them, unless `listen` was called.

    In the main thread.
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
    """Lets processes tell each other of requests at `board`, a store of torch.distributed.

    None: no longer.
    """
    request.board, request.known = board, False


def asked() -> bool:
    """Returns whether this process or its launcher was asked to stop or, some LOOK seconds later,
    another process of the run. No collective: call it at any time, from any thread.
    """
    own = bool(request.came) or (request.file is not None and request.file.exists())
    if request.board is None or request.known:
        return own or request.known
    if own or time.monotonic() - request.looked >= LOOK:
        request.looked = time.monotonic()
        # whoever serves the board has ended, and its launcher says why
        with suppress(RuntimeError):
            if own:
                request.board.set(ASKED, "")
            request.known = own or request.board.check([ASKED])
    return own or request.known


def agreed(group: Any = None) -> bool:
    """Returns whether any process of the group (None: all) was asked to stop: a collective, with
    the same answer on all.
    """
    from rftmega.runtime.parallel.collectives import (
        gather_objects,  # torch would keep `listen` waiting
    )

    return any(gather_objects(asked(), group))
