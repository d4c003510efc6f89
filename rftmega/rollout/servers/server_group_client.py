"""Sends completion requests to all servers from one event loop, also during pushes and while
servers join and leave.
"""

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

LOOK_SECONDS = 0.02  # between two checks for a server with weights and room
WATCH_SECONDS = 0.5  # between two checks of servers that failed or missed a push
ELSEWHERE_SECONDS = 5.0  # between two checks for remote servers that joined or left
EMPTY_ABORTS = 5  # consecutive aborts without a token under the same weights
log = logging.getLogger(__name__)


class ServerGroupClient:
    """ServerGroupClient sends each completion request to a server with room. After a failure or an
    abort, it continues the request on any server, from the tokens generated so far.
    """

    def __init__(self, engine: ServerEngine):
        """Starts without connections. `engine`: has the servers and the last push's version."""
        self.engine = engine
        self._connections: dict[ServerClient, Connections] = {}
        self._busy: Counter[ServerClient] = Counter()
        self._home: dict[int, ServerClient] = {}  # rollout -> the server that has its first turns
        self._watching: asyncio.Task[None] | None = None

    @property
    def stranded(self) -> bool:
        """Returns whether no server can get requests although weights were pushed."""
        return self.engine.version is not None and not self.engine.healthy

    async def complete(
        self,
        request: Request,
        sampling: Sampling,
        begun: Callable[[int], None] = lambda version: None,
    ) -> Completion:
        """Returns the completion of a request; its tokens may be of several weight versions, since
        pushes do not end it. `begun` is called with the newest weight version each time the request
        is sent to a server.

        Waits while no server has room. Raises EngineError if a server refuses the request as
        invalid.
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
                # only a push aborts a request that has no token yet
                idle = found.reason == "abort" and len(found.token_ids) == len(before.token_ids)
                empty = empty + 1 if idle and newest == self.engine.newest else 0
                if empty == EMPTY_ABORTS:
                    empty = 0
                    raise EngineFault(
                        f"It broke a request off {EMPTY_ABORTS} times without a token."
                    )
            except EngineFault as fault:
                if server in self.engine.healthy:  # otherwise it is known already
                    self.engine.note_fault(server, fault)
            finally:
                self._busy[server] -= 1
        return found.whole()

    def forget(self, rollout: int) -> None:
        """Forgets which server generated the earlier turns of the rollout with number `rollout`,
        once it has ended.
        """
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
        """Requests the continuation of `before` from `server`. Returns `before` with the new tokens
        appended. Raises EngineFault if the server fails or, during the request, stops being
        healthy: a server that missed a push stays paused and would never reply.
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
        """Probes servers that failed, so that recovered servers get requests again, and looks for
        new servers; runs until cancelled.
        """
        looked = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.engine.version is None:  # a push is in progress, which checks servers itself
                continue
            if time.monotonic() - looked > ELSEWHERE_SECONDS:
                looked = time.monotonic()
                try:
                    await asyncio.to_thread(self.engine.server_group.find_remote_servers)
                except Exception as error:
                    # an unreadable server list, or an invalid address
                    log.warning("servers elsewhere were not looked for: %r", error)
            for member in list(self.engine.server_group.members):
                if member.state is ServerState.SUSPECT and member.health.probe_is_due:
                    await asyncio.to_thread(self.engine.server_group.probe, member)

    async def _server_for(self, request: Request) -> ServerClient:
        """Returns the server that generated the rollout's earlier turns or, for a new rollout, the
        server with the fewest running requests. Waits until such a server has weights and room.
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
