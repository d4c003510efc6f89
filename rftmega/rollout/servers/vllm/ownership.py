"""Ownership keeps a server for one run at a time: whoever has the key may claim it, and the run that
did keeps it as long as it is heard of.
"""

import time
from collections.abc import Callable
from typing import Any

OWNER = "/owner"  # answered by the door: POST {"run": ..., "name": ...} claims; with no name, it releases
HEADER = "x-rftmega-run"  # of every request of an owner
LEASE_SECONDS = 60.0  # after which a run that is not heard of has lost the server to the next one
TAKEN = 409  # status
BAD = 400


class Ownership:
    """Ownership is that of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.changes = 0  # of the owner: weights of another one's are not the run's
        self._clock = clock
        self._run = self._name = ""
        self._heard = 0.0

    def told(self, said: Any) -> tuple[int, dict[str, Any]]:
        """Claims or releases the server. Returns a status, and what is answered."""
        if not isinstance(said, dict):
            return BAD, {"error": "no object"}
        run, name = said.get("run"), said.get("name", "")
        if not isinstance(run, str) or not run or not isinstance(name, str):
            return BAD, {"error": "a claim has the name of a run"}
        age = self._clock() - self._heard
        if self._run not in ("", run) and (age < LEASE_SECONDS or not name):
            return TAKEN, {"owner": self._name, "heard": float(age)}
        if not name:
            self._run = ""
            return 200, {"status": "released"}
        if self._run != run:
            self.changes += 1
        self._run, self._name, self._heard = run, name, self._clock()
        return 200, {"status": "claimed"}

    def allows(self, run: str) -> bool:
        """Says whether a request of this run is taken; a server that nobody claimed takes all."""
        return self._run in ("", run)
