"""ServerGroupClient asks all servers from one event loop, while weights come and servers go."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from rftmega.core.errors import EngineFault
from rftmega.core.types import Completion, Sampling
from rftmega.rollout.requests import Request
from rftmega.rollout.requests.partial_completion import NOTHING, PartialCompletion
from rftmega.rollout.servers.health import ServerState
from rftmega.rollout.servers.server_client import Connections, ServerClient
from rftmega.rollout.servers.server_engine import ServerEngine

LOOK_SECONDS = 0.02  # between two looks whether there is a server with weights, and room
WATCH_SECONDS = 0.5  # between two looks at servers that failed, or missed a push
ELSEWHERE_SECONDS = 5.0  # between two looks whether servers elsewhere have come or left
EMPTY_ABORTS = 5  # in a row under the same weights: a server that gives no token, and breaks off
log = logging.getLogger(__name__)


class ServerGroupClient:
    """ServerGroupClient gives each request to a server that has room, and asks another where one fails:
    with the same seed, and from the tokens on that are there.
    """

    def __init__(self, engine: ServerEngine):
        """`engine`: says which servers there are, and when a push lands."""
        self.engine = engine
        self._connections: dict[ServerClient, Connections] = {}
        self._busy: Counter[ServerClient] = Counter()
        self._home: dict[int, ServerClient] = {}  # rollout -> the server that has its first turns
        self._watching: asyncio.Task[None] | None = None

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
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        found, empty = NOTHING, 0
        while found.reason == "abort":
            server = await self._server_for(request)
            begun(self.engine.newest)
            self._busy[server] += 1
            before, newest = found, self.engine.newest
            try:
                found = await self._part(server, request, sampling, found)
                # a push breaks off what has no token yet; nothing else does
                idle = found.reason == "abort" and len(found.token_ids) == len(before.token_ids)
                empty = empty + 1 if idle and newest == self.engine.newest else 0
                if empty == EMPTY_ABORTS:
                    empty = 0
                    raise EngineFault(
                        f"It broke a request off {EMPTY_ABORTS} times without a token."
                    )
            except EngineFault as fault:
                if server in self.engine.healthy:  # else it is known, and no fault of the request's
                    self.engine.note_fault(server, fault)
            finally:
                self._busy[server] -= 1
        return found.whole()

    def forget(self, rollout: int) -> None:
        """Forgets a rollout, which has ended."""
        self._home.pop(rollout, None)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for connections in self._connections.values():
            with suppress(Exception):
                await connections.close()
        self._connections.clear()

    async def _part(
        self, server: ServerClient, request: Request, sampling: Sampling, before: PartialCompletion
    ) -> PartialCompletion:
        """Asks one server. Raises EngineFault where it fails, or may no longer be asked: one that
        missed a push stands still.
        """
        asking = asyncio.ensure_future(
            self.engine.part(self._connections_to(server), request, sampling, before)
        )
        try:
            while not (await asyncio.wait([asking], timeout=WATCH_SECONDS))[0]:
                if server not in self.engine.healthy:
                    raise EngineFault(f"The server at {server.address} is asked nothing more.")
            return asking.result()
        finally:
            asking.cancel()

    async def _watch(self) -> None:
        """Probes servers that failed, so that one that answers is asked again, and finds those that
        have come.
        """
        looked = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.engine.version is None:  # a push is under way, which looks itself
                continue
            if time.monotonic() - looked > ELSEWHERE_SECONDS:
                looked = time.monotonic()
                try:
                    await asyncio.to_thread(self.engine.server_group.look_elsewhere)
                except Exception as error:
                    # a server list that can't be read now, or an address that is none
                    log.warning("servers elsewhere were not looked for: %r", error)
            for member in list(self.engine.server_group.members):
                if member.state is ServerState.SUSPECT and member.health.probe_is_due:
                    await asyncio.to_thread(self.engine.server_group.probe, member)

    async def _server_for(self, request: Request) -> ServerClient:
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

    def _connections_to(self, server: ServerClient) -> Connections:
        if server not in self._connections:
            self._connections[server] = server.connections()
        return self._connections[server]
