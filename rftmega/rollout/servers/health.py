"""ServerHealth follows what is known of one server, and says whether it is asked."""

import time
from collections.abc import Callable
from enum import StrEnum

DEAD_AFTER = 3  # probes in a row that failed
FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0  # seconds before the next probe; twice as long after each


class ServerState(StrEnum):
    """ServerState is one of five; only a healthy server is asked."""

    HEALTHY = "healthy"  # has the newest weights, and answers
    SUSPECT = "suspect"  # failed a request, and must answer a probe first
    DEAD = "dead"  # ended, or answered no probe
    RESTARTING = "restarting"
    STALE = "stale"  # answers, and has not got a whole push since it came or missed one


class ServerHealth:
    """ServerHealth is a circuit breaker: a server that failed is asked nothing (open), then for one
    token (half-open), and again whatever there is once it gave that (closed).

    It has the newest weights as long as it misses no push.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.state = ServerState.RESTARTING
        self.faults = self.starts = self.requests = self.tokens = 0
        self.landings = 0  # pushes since it came
        self._clock = clock
        self._probes = 0  # in a row that failed
        self._fruitless = 0  # faults since it last gave an answer that was one
        self._next_probe = 0.0
        self._current = False  # has the newest weights

    def came(self) -> None:
        """Notes that it answers, with weights of which nothing is known."""
        self.starts += 1
        self.landings = 0
        self.state, self._current, self._probes = ServerState.STALE, False, 0
        self._fruitless = 0

    def landed(self) -> None:
        """Notes that it has a whole push."""
        self.landings += 1
        self.state, self._current, self._probes = ServerState.HEALTHY, True, 0

    def missed(self) -> None:
        """Notes that it has not got a push that others may have."""
        self._current = False
        if self.state is ServerState.HEALTHY:
            self.state = ServerState.STALE

    def failed(self) -> bool:
        """Notes that a request failed. Returns whether that is news."""
        if self.state in (ServerState.SUSPECT, ServerState.DEAD, ServerState.RESTARTING):
            return False
        self.faults += 1
        self._fruitless += 1
        if self._fruitless > DEAD_AFTER:  # it answers probes, and nothing else
            self.absent()
            return True
        self.state = ServerState.SUSPECT
        self._next_probe = self._clock() + FIRST_WAIT
        return True

    def answered(self, tokens: int) -> None:
        """Notes a completion."""
        self.requests += 1
        self.tokens += tokens
        self._fruitless = 0

    def died(self) -> None:
        """Notes that it has ended."""
        self.state, self._current = ServerState.DEAD, False

    def absent(self) -> None:
        """Notes that it does not answer, or may not be used: it is looked for again later."""
        self.died()
        self._probes += 1
        self._wait_for_next_probe()

    def restarting(self) -> None:
        self.state, self._current = ServerState.RESTARTING, False

    @property
    def probe_is_due(self) -> bool:
        """Says whether it should be asked for a token now."""
        waits = self.state in (ServerState.SUSPECT, ServerState.DEAD)
        return waits and self._clock() >= self._next_probe

    def probed(self, answered: bool) -> None:
        """Notes what came of a probe."""
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
