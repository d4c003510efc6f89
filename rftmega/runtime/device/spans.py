"""Measures this process's work by name: the total time of each kind of work and, while recording, a
span (begin and end) for every stretch of work.

Measuring is off by default, and then nothing is timed (`SpanRecorder.measuring`).
"""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from rftmega.runtime.device import current

Function = TypeVar("Function", bound=Callable[..., Any])
clock = time.perf_counter_ns
# span names of a training pass, whatever backend records them
FORWARD, BACKWARD, SCHEDULE, REDUCE = "forward", "backward", "schedule", "all-grads-sync"


class Span(NamedTuple):
    """Span is one stretch of work of a thread: its name, and when it began and ended in nanoseconds
    of this process's `clock`.
    """

    name: str
    thread: str
    begin: int
    end: int


class SpanRecorder:
    """SpanRecorder adds up the seconds of spans, and counts, by name; between `record` and `stop`
    it also stores every single span.
    """

    def __init__(self) -> None:
        self.measuring = self.recording = False
        self._sums: dict[str, float] = defaultdict(float)
        # device timestamps that may not have been reached yet
        self._pending: list[tuple[str, Any, Any]] = []
        self._spans: list[Span] = []
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def take(self) -> dict[str, float]:
        """Returns name -> total since the last call (seconds of spans of this name, or the sum of
        the amounts counted under it), and resets the totals; waits until the device has finished
        the timed work.
        """
        for name, begin, end in self._pending:
            self.count(name, current().seconds(begin, end))
        self._pending.clear()
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return sums

    def counted(self, name: str) -> float:
        """Returns the total under `name` since the last `take`: seconds of a span, or a count."""
        with self._lock:
            return self._sums.get(name, 0.0)

    def count(self, name: str, amount: float) -> None:
        if self.measuring:
            with self._lock:
                self._sums[name] += amount

    def record(self) -> None:
        """Starts to store every span; from then on, spans of device work wait for the device at
        their begin and end.
        """
        self._spans, self.recording = [], True

    def stop(self) -> list[Span]:
        """Ends the recording and returns all spans since `record`."""
        self.recording = False
        return self._spans

    def keep(self, name: str, begin: int, end: int, thread: str | None = None) -> None:
        """Stores one span if the recorder is recording.

        `begin`, `end`: nanoseconds of this process's `clock`; `thread`: name of the thread that did
        the work, by default the calling one.
        """
        if self.recording:
            self._spans.append(Span(name, thread or threading.current_thread().name, begin, end))

    def start(self, name: str) -> None:
        """Starts a span of device work, which the device may execute later than the host queues it.
        `finish` ends the span; spans of one name don't overlap.
        """
        if self.recording:
            current().finish()
            self._open[name] = clock()
        elif self.measuring:
            self._open[name] = current().moment()

    def finish(self, name: str) -> None:
        begin = self._open.pop(name, None)
        if begin is None:
            return
        if self.recording and isinstance(begin, int):
            current().finish()
            end = clock()
            self.keep(name, begin, end)
            self.count(name, (end - begin) / 1e9)
        elif not self.recording and not isinstance(begin, int):
            self._pending.append((name, begin, current().moment()))


recorder = SpanRecorder()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Records a span of host work within a `with` block, in any thread."""
    if not (recorder.measuring or recorder.recording):
        yield
        return
    begin = clock()
    try:
        yield
    finally:
        end = clock()
        recorder.keep(name, begin, end)
        recorder.count(name, (end - begin) / 1e9)


def spanned(name: str) -> Callable[[Function], Function]:
    """Returns a decorator that records every call of a function as a span called `name`."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    return decorate
