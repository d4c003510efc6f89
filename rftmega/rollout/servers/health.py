"""Health of one server: a circuit breaker that decides whether the server gets requests."""

import time
from collections.abc import Callable
from enum import StrEnum

DEAD_AFTER = 3  # consecutive failed probes
FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0  # seconds before the next probe; doubled after each


class ServerState(StrEnum):
    """ServerState is the state of one server. Only a healthy server gets requests."""

    HEALTHY = "healthy"  # has the newest weights, and responds
    SUSPECT = "suspect"  # failed a request, and must pass a probe first
    DEAD = "dead"  # ended, or failed all probes
    RESTARTING = "restarting"
    STALE = "stale"  # responds, but has had no complete push since it started or missed one


class ServerHealth:
    """ServerHealth is a circuit breaker: a server that failed gets no requests (open), then a
    one-token probe (half-open), and all requests again once it passes the probe (closed).

    The server counts as having the newest weights until it misses a push.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.state = ServerState.RESTARTING
        self.faults = self.starts = self.requests = self.tokens = 0
        self.landings = 0  # pushes since it started
        self._clock = clock
        self._probes = 0  # consecutive failed probes
        self._fruitless = 0  # faults since its last valid completion
        self._next_probe = 0.0
        self._current = False  # has the newest weights

    def came(self) -> None:
        """Records that the server has started or come back: it responds, but needs a push, since
        nobody knows its weights.
        """
        self.starts += 1
        self.landings = 0
        self.state, self._current, self._probes = ServerState.STALE, False, 0
        self._fruitless = 0

    def landed(self) -> None:
        """Records that the server has received all weights of a push: it may get requests."""
        self.landings += 1
        self.state, self._current, self._probes = ServerState.HEALTHY, True, 0

    def missed(self) -> None:
        """Records that the server did not receive a push, so that it gets no requests before
        another.
        """
        self._current = False
        if self.state is ServerState.HEALTHY:
            self.state = ServerState.STALE

    def failed(self) -> bool:
        """Records a failed request. Returns True if this is news, False if the server was already
        suspect, dead or restarting.
        """
        if self.state in (ServerState.SUSPECT, ServerState.DEAD, ServerState.RESTARTING):
            return False
        self.faults += 1
        self._fruitless += 1
        if self._fruitless > DEAD_AFTER:  # it passes probes, but fails all requests
            self.absent()
            return True
        self.state = ServerState.SUSPECT
        self._next_probe = self._clock() + FIRST_WAIT
        return True

    def answered(self, tokens: int) -> None:
        """Records that the server returned a valid completion of `tokens` tokens."""
        self.requests += 1
        self.tokens += tokens
        self._fruitless = 0

    def died(self) -> None:
        """Records that the server's process has ended or that the server is unusable."""
        self.state, self._current = ServerState.DEAD, False

    def absent(self) -> None:
        """Records that the server does not respond or may not be used. It is tried again after a
        wait that doubles each time, up to LONGEST_WAIT seconds.
        """
        self.died()
        self._probes += 1
        self._wait_for_next_probe()

    def restarting(self) -> None:
        self.state, self._current = ServerState.RESTARTING, False

    @property
    def probe_is_due(self) -> bool:
        """Returns whether the server needs a probe, since it failed, and the wait before it is
        over.
        """
        waits = self.state in (ServerState.SUSPECT, ServerState.DEAD)
        return waits and self._clock() >= self._next_probe

    def probed(self, answered: bool) -> None:
        """Records the result of a probe (test request). `answered`: whether the server replied in
        time.
        """
        if answered:
            self._probes = 0
            self.state = ServerState.HEALTHY if self._current else ServerState.STALE
            return
        self._probes += 1
        self._wait_for_next_probe()
        if self._probes >= DEAD_AFTER:
            self.died()

    def _wait_for_next_probe(self) -> None:
        wait = min(FIRST_WAIT * 2**self._probes, LONGEST_WAIT)
        self._next_probe = self._clock() + wait
