"""Being asked to stop: SIGTERM or SIGUSR1, in any process of the run or its launcher, ends it after the step that it is in."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftmega.parallel.collectives import all_reduce

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Request:
    """Of this process; `file` is there once the launcher was asked, where there is one that says so."""

    came = False
    file: Path | None = None


request = Request()


@contextmanager
def listening() -> Iterator[None]:
    """Within, the signals are requests; outside, they end the process at once. In the main thread."""

    def note(number: int, frame: Any) -> None:
        request.came = True

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def asked() -> bool:
    """Whether this process or its launcher was."""
    return request.came or (request.file is not None and request.file.exists())


def agreed() -> bool:
    """Whether any process was: the same answer on all of them, from a collective."""
    return bool(all_reduce(int(asked()), "max"))
