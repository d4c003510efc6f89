"""Lease of a server by one run at a time: any run with the key may claim a free server, and holds
it as long as it renews the lease.
"""

import time
from collections.abc import Callable
from typing import Any

OWNER = "/owner"  # see `auth`: POST {"run": ..., "name": ...} claims; without a name, it releases
HEADER = "x-rftmega-run"  # header of every request of an owner
LEASE_SECONDS = 60.0  # without renewal, after which another run may claim the server
TAKEN = 409  # status
BAD = 400


class Ownership:
    """Ownership is the lease of one server: which run holds it and when the run last renewed it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.changes = 0  # of the owner: a new owner must not use the last one's weights
        self._clock = clock
        self._run = self._name = ""
        self._heard = 0.0

    def told(self, said: Any) -> tuple[int, dict[str, Any]]:
        """Handles a request with which a run claims, renews or releases the server. `said`: the
        request's JSON, {"run": id, "name": description}, without a name to release. Returns the
        HTTP status and the JSON body of the reply.
        """
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
        """Returns whether the server accepts requests of the run with id `run`: it holds the
        server, or no run does.
        """
        return self._run in ("", run)
