"""Being asked to stop: SIGTERM or SIGUSR1, in any process of the run or its launcher, ends it after the step that it is in."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Request:
    """Of this process; `file` is there once the launcher was asked, where there is one that says so."""

    came = 0  # the signal's number
    file: Path | None = None


request = Request()


def listen() -> None:
    """From now on the signals are requests. The first thing that a process of a run does, in its main thread: its imports take
    seconds, and a signal that nobody listens for ends it.
    """
    for number in SIGNALS:
        signal.signal(number, _note)


def unlisten() -> None:
    """The signals end this process at once, one that came already, too: a run that saves nothing can't go on later."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if request.came:
        signal.raise_signal(request.came)


def _note(number: int, frame: Any) -> None:
    request.came = number


@contextmanager
def listening() -> Iterator[None]:
    """Within, the signals are requests, whatever they were outside. In the main thread."""
    before = {number: signal.signal(number, _note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def asked() -> bool:
    """Whether this process or its launcher was."""
    return bool(request.came) or (request.file is not None and request.file.exists())


def agreed() -> bool:
    """Whether any process was: the same answer on all of them, from a collective."""
    from rftmega.parallel.collectives import all_reduce  # torch would keep `listen` waiting

    return bool(all_reduce(int(asked()), "max"))
