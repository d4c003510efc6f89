"""FleetClient asks all servers from one event loop, while weights come and servers go."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import httpx

from rftmega.errors import EngineFault
from rftmega.fleet.connection import ServerConnection
from rftmega.fleet.partial_completion import NOTHING
from rftmega.fleet.server import Server
from rftmega.fleet.server_engine import ServerEngine
from rftmega.fleet.server_requests import Line
from rftmega.requests import Request
from rftmega.types import Completion, Sampling

LOOK_SECONDS = 0.02  # between two looks whether there is a server with weights, and room


class FleetClient:
    """FleetClient gives each request to a server that has room, and asks another where one fails:
    with the same seed, and from the tokens on that are there.
    """

    def __init__(self, engine: ServerEngine):
        """`engine`: says which servers there are, and when a push lands."""
        self.engine = engine
        self._lines: dict[Server, Line] = {}
        self._busy: Counter[Server] = Counter()
        self._home: dict[int, Server] = {}  # rollout -> the server that has its first turns
        self._http: httpx.AsyncClient | None = None

    @property
    def stranded(self) -> bool:
        """Says that no server is left that could answer."""
        return self.engine.version is not None and not self.engine.healthy

    async def complete(
        self,
        request: Request,
        sampling: Sampling,
        begun: Callable[[int], None] = lambda version: None,
    ) -> Completion:
        """Returns the completion, whose tokens may be of several versions. `begun` is told the newest
        version there is when a server begins.

        Waits for a server where there is none. Raises EngineError where the servers can't answer such
        a request.
        """
        found = NOTHING
        while found.reason == "abort":
            server = await self._server_for(request)
            begun(self.engine.newest)
            self._busy[server] += 1
            try:
                found = await self.engine.part(self._line_to(server), request, sampling, found)
            except EngineFault as fault:
                self.engine.note_fault(server, fault)
            finally:
                self._busy[server] -= 1
        return found.whole()

    def forget(self, rollout: int) -> None:
        """Forgets a rollout, which has ended."""
        self._home.pop(rollout, None)

    async def close(self) -> None:
        for line in self._lines.values():
            with suppress(Exception):
                await line.connection.close()
        self._lines.clear()
        if self._http is not None:
            await self._http.aclose()

    async def _server_for(self, request: Request) -> Server:
        """Returns the rollout's server, or that with fewest requests; waits until one has weights and
        room.
        """
        most = self.engine.config.max_batch
        while True:
            healthy = self.engine.healthy if self.engine.version is not None else []
            home = self._home.get(request.rollout)
            chosen = [home] if home in healthy else healthy
            free = [server for server in chosen if server and self._busy[server] < most]
            if free:
                server = min(free, key=self._busy.__getitem__)
                self._home[request.rollout] = server
                return server
            await asyncio.sleep(LOOK_SECONDS)

    def _line_to(self, server: Server) -> Line:
        if server not in self._lines:
            if self._http is None:
                timeout = httpx.Timeout(None, connect=30.0)
                limits = httpx.Limits(max_connections=None)
                self._http = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
            connection = ServerConnection(server.address, server.headers)
            self._lines[server] = Line(server, self._http, connection)
        return self._lines[server]
