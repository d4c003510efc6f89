"""Distributes the requests of one generation over several servers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineFault
from rftmega.core.types import Completion
from rftmega.rollout.requests import Request, Requests
from rftmega.rollout.requests.order import Waiting, ordered
from rftmega.rollout.servers.server_client import Connections, ServerClient

LOOK_SECONDS = 0.2  # between two checks whether the scored rollouts suffice


Ask = Callable[[Connections, Request], Coroutine[Any, Any, Completion]]


class ServerRequests:
    """ServerRequests distributes the requests of one generation over the servers.

    `faults`: the EngineFault of each failed server, by the server's index.
    """

    def __init__(
        self, servers: Sequence[ServerClient], config: RolloutConfig, runner: asyncio.Runner
    ):
        self.servers, self.most, self.runner = servers, config.max_batch, runner
        self.faults: dict[int, EngineFault] = {}
        self._connections = [server.connections() for server in servers]
        # server and number of each running request
        self._running: dict[asyncio.Task[Completion], tuple[int, int]] = {}
        self._home: dict[int, int] = {}  # rollout -> the server that has its first turns

    def hold(self, requests: Requests, ask: Ask) -> bool:
        """Takes requests from `requests`, sends them to servers and passes the completions back,
        until none is left that a server could serve, or `requests.stopped` returns True. Returns
        whether it was stopped.

        `ask` is a coroutine function that sends a request to a server. The methods of `requests`
        are called outside the event loop, so no running request advances meanwhile.
        """
        room = self.most * len(self.servers)
        known = list(requests.take(room))
        expected = [request.expected for request in known]
        waiting = Waiting(ordered(known, expected, len(self.servers), self.most))
        while True:
            for number, place in waiting.taken(self._room()):
                self._home[known[place].rollout] = number
                # its deadline does not start while it waits
                task = ask(self._connections[number], known[place])
                self._running[self.runner.get_loop().create_task(task)] = number, place
            if not self._running:
                return False
            ended = [self._ended(task) for task in self.runner.run(self._some())]
            found = {place: completion for place, completion in ended if completion}
            if found:
                requests.finished(list(found), list(found.values()))
            unanswered = [place for place, completion in ended if completion is None]
            if unanswered and not self.stranded:
                self._ask_elsewhere(unanswered, known, waiting)
            if requests.stopped():
                return True
            room = sum(self._room().values())
            further = requests.take(room) if room else ()
            for place, request in enumerate(further, start=len(known)):
                waiting.add(self._home_of(request), place)
            known += further

    @property
    def stranded(self) -> bool:
        """Returns whether all servers have failed."""
        return len(self.faults) == len(self._connections)

    def close(self) -> bool:
        """Cancels the running requests and closes the connections. Returns whether any request was
        running.
        """
        for task in self._running:
            task.cancel()
        self.runner.run(self._closed())
        return bool(self._running)

    def _room(self) -> dict[int, int]:
        """Returns how many further requests each server can begin, by server index; failed servers
        are left out.
        """
        busy = Counter(number for number, _ in self._running.values())
        healthy = [number for number in range(len(self.servers)) if number not in self.faults]
        return {number: self.most - busy[number] for number in healthy}

    def _ask_elsewhere(
        self, unanswered: Sequence[int], known: Sequence[Request], waiting: Waiting
    ) -> None:
        """Queues the requests of failed servers for other servers. `unanswered`: indices of the
        requests that had begun there; requests still queued for a failed server are added. `known`:
        all requests of the generation; `waiting`: the queues of the servers.
        """
        for number in self.faults:
            unanswered = [*unanswered, *waiting.withdrawn(number)]
        for place in unanswered:
            waiting.add(self._home_of(known[place]), place)

    def _home_of(self, request: Request) -> int:
        """Returns the index of the server that the request's rollout used before; for a new
        rollout, or if that server failed, the server with the fewest rollouts.
        """
        if self._home.get(request.rollout, -1) not in self._room():
            room = self._room()
            homes = Counter(self._home.values())
            self._home[request.rollout] = min(room, key=lambda number: homes[number])
        return self._home[request.rollout]

    def _ended(self, task: asyncio.Task[Completion]) -> tuple[int, Completion | None]:
        """Returns the index and completion of the request whose `task` has ended. If its server
        failed, records the fault and returns None as the completion.
        """
        number, place = self._running.pop(task)
        try:
            return place, task.result()
        except EngineFault as fault:
            self.faults.setdefault(number, fault)
            return place, None

    async def _some(self) -> set[asyncio.Task[Completion]]:
        """Waits up to LOOK_SECONDS for a request to end. Returns the asyncio tasks of the requests
        that have ended.
        """
        done, _ = await asyncio.wait(
            self._running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        return done

    async def _closed(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        for connections in self._connections:
            await connections.close()
