"""ServerRequests spreads the requests of one generation over several servers."""

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

LOOK_SECONDS = 0.2  # between two looks whether what has arrived, and was scored since, is enough


Ask = Callable[[Connections, Request], Coroutine[Any, Any, Completion]]


class ServerRequests:
    """ServerRequests spreads the requests of one generation over the servers.

    `faults`: server -> what it failed with.
    """

    def __init__(
        self, servers: Sequence[ServerClient], config: RolloutConfig, runner: asyncio.Runner
    ):
        self.servers, self.most, self.runner = servers, config.max_batch, runner
        self.faults: dict[int, EngineFault] = {}
        self._connections = [server.connections() for server in servers]
        # server and number of each request that is being answered
        self._running: dict[asyncio.Task[Completion], tuple[int, int]] = {}
        self._home: dict[int, int] = {}  # rollout -> the server that has its first turns

    def hold(self, requests: Requests, ask: Ask) -> bool:
        """Answers until no request is left that a server could answer, or they are stopped: whether
        they are. The event loop stands still while `requests` is asked or told.
        """
        room = self.most * len(self.servers)
        known = list(requests.take(room))
        expected = [request.expected for request in known]
        waiting = Waiting(ordered(known, expected, len(self.servers), self.most))
        while True:
            for number, place in waiting.taken(self._room()):
                self._home[known[place].rollout] = number
                # a deadline is no time in which one waits
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
        """Says that no server is left."""
        return len(self.faults) == len(self._connections)

    def close(self) -> bool:
        """Breaks off what is not answered, and says whether there was something."""
        for task in self._running:
            task.cancel()
        self.runner.run(self._closed())
        return bool(self._running)

    def _room(self) -> dict[int, int]:
        """Returns server -> how many more it could answer; those that failed have no room."""
        busy = Counter(number for number, _ in self._running.values())
        healthy = [number for number in range(len(self.servers)) if number not in self.faults]
        return {number: self.most - busy[number] for number in healthy}

    def _ask_elsewhere(
        self, unanswered: Sequence[int], known: Sequence[Request], waiting: Waiting
    ) -> None:
        """Hands on what a server that failed had, and what waits for it alone."""
        for number in self.faults:
            unanswered = [*unanswered, *waiting.withdrawn(number)]
        for place in unanswered:
            waiting.add(self._home_of(known[place]), place)

    def _home_of(self, request: Request) -> int:
        """Returns the server of the rollout; of a new one that which has fewest rollouts."""
        if self._home.get(request.rollout, -1) not in self._room():
            room = self._room()
            homes = Counter(self._home.values())
            self._home[request.rollout] = min(room, key=lambda number: homes[number])
        return self._home[request.rollout]

    def _ended(self, task: asyncio.Task[Completion]) -> tuple[int, Completion | None]:
        """Returns number and completion of a request; None where its server failed."""
        number, place = self._running.pop(task)
        try:
            return place, task.result()
        except EngineFault as fault:
            self.faults.setdefault(number, fault)
            return place, None

    async def _some(self) -> set[asyncio.Task[Completion]]:
        """Waits for a completion, a while."""
        done, _ = await asyncio.wait(
            self._running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        return done

    async def _closed(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        for connections in self._connections:
            await connections.close()
