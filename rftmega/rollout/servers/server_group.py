"""The group of a run's servers: its members, their health, and whether they have the newest
weights.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rftmega.config.addresses import address_of
from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.types import Metrics
from rftmega.rollout.servers import server_client
from rftmega.rollout.servers.health import ServerHealth, ServerState
from rftmega.rollout.servers.protocol.claims import ServerTaken
from rftmega.rollout.servers.protocol.server_list import ServerListLook, read_server_list
from rftmega.rollout.servers.server_client import ServerClient
from rftmega.runtime.parallel.watchdog import mark

LOOK_SECONDS = 0.5  # between two checks for new servers
KEEP_SECONDS = 5.0  # between two lease renewals of a remote server
log = logging.getLogger(__name__)


class ServerGroupMember:
    """ServerGroupMember is a server of the run's group, with its client, health, process identity
    and lease.
    """

    def __init__(self, number: int, server: ServerClient):
        """Adds a server whose state is not known yet. `number`: the server's number in the group,
        which it keeps when it is restarted; `server`: its client.
        """
        self.number, self.server = number, server
        self.health = ServerHealth()
        self.paused = False  # a push began without ending
        self.identity = ""  # of its process, if known
        self.refusal: ServerTaken | None = None  # set if a running run holds it
        self.taken = 0.0  # when another run was first found to hold it; 0: never

    @property
    def name(self) -> str:
        """Returns the name of this start of the server: a restarted server has another name."""
        return f"server-{self.number}-start-{self.health.starts}"

    @property
    def state(self) -> ServerState:
        return self.health.state

    def note_taken(self, error: ServerTaken) -> None:
        """Records that another run holds the server. `error`: the exception of this run's claim. If
        the other run is still active, i.e. has renewed its lease since the server was first found
        taken, stores `error` in `refusal`.
        """
        now = time.monotonic()
        self.taken = self.taken or now
        if error.heard < now - self.taken:
            self.refusal = error
        self.health.absent()


class ServerGroup:
    """ServerGroup manages the servers of a run: it starts local ones, finds remote ones, probes and
    restarts them, and knows which have the newest weights.
    """

    def __init__(
        self,
        start: Callable[[int], ServerClient],
        *,
        own: int = 0,
        client: Callable[[str], ServerClient] | None = None,
        addresses: Sequence[str] = (),
        server_list: str | Path = "",
        check: Callable[[ServerClient], None] = lambda server: None,
        keep: Callable[[ServerClient], None] = lambda server: None,
    ):
        """Starts the local servers. `start`: starts the local server with a given number, returns
        its client; `own`: number of local servers. `client`: creates the client of the remote
        server at an address; None: all servers are local. `addresses`: addresses of permanent
        remote servers. `server_list`: a file with further addresses, one per line, read again
        during the run. `check`: raises EngineError for a server that does not fit the run. `keep`:
        renews the lease of a remote server; raises ServerTaken if another run holds the server.
        """
        self._start, self._client, self._check, self._keep = start, client, check, keep
        self._addresses = [address_of(address) for address in addresses]
        self._server_list = Path(server_list) if server_list else None
        self._problems: tuple[str, ...] = ()  # of the server list at its last read
        self._taking_in = threading.Lock()
        self._closed = threading.Event()
        self._keeping: threading.Thread | None = None
        self._numbers = 0  # given so far
        self._looking = threading.Lock()  # one thread at a time checks the servers
        self.pushing = False  # no server joins or leaves meanwhile
        self.members: list[ServerGroupMember] = [self._member(start(n)) for n in range(own)]

    def _member(self, server: ServerClient) -> ServerGroupMember:
        self._numbers += 1
        return ServerGroupMember(self._numbers - 1, server)

    def wait(self) -> None:
        """Waits until all local servers and at least one remote server are ready.

        Raises the error of a local server that does not start, and EngineError if no remote server
        becomes usable within START_SECONDS.
        """
        for member in self.members:
            member.server.wait()
            self._check(member.server)
            member.health.came()
        if self._client is not None:
            self._keeping = threading.Thread(target=self._keep_all, name="claims", daemon=True)
            self._keeping.start()
        self.wait_for_remote_server()

    def wait_for_remote_server(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Waits until a remote server can receive weights, or `stop` returns True; returns at once
        if all servers are local.

        Raises EngineError if none can within START_SECONDS, and ServerTaken if other active runs
        hold all servers.
        """
        if self._client is None:
            return
        asked = [
            *self._addresses,
            *([f"those of {self._server_list}"] if self._server_list else []),
        ]
        begin = time.monotonic()
        self.renew()
        if not self.reachable:
            log.info("waiting for a server: %s", ", ".join(asked))
        while not self.reachable and not stop():
            refusals = [each.refusal for each in self.members if each.refusal is not None]
            if refusals and len(refusals) == len(self.members):
                raise refusals[0]
            if time.monotonic() - begin > server_client.START_SECONDS:
                raise EngineError(
                    f"No server could be used within {server_client.START_SECONDS:g} s: {', '.join(asked)}. Look whether "
                    "they run, with the same key and the right version; one that answers and does not fit is named above."
                )
            mark()
            time.sleep(LOOK_SECONDS)
            self.renew()

    @property
    def servers(self) -> list[ServerClient]:
        return [member.server for member in self.members]

    @property
    def healthy(self) -> list[ServerClient]:
        """Returns the clients of the servers that get requests: they respond and have the newest
        weights.
        """
        return [each.server for each in self.members if each.state is ServerState.HEALTHY]

    @property
    def reachable(self) -> list[ServerGroupMember]:
        """Returns the members that respond, whatever their weights, so that they can receive a
        push.
        """
        there = (ServerState.HEALTHY, ServerState.STALE)
        return [each for each in self.members if each.state in there]

    @property
    def late(self) -> list[ServerGroupMember]:
        """Returns the remote servers that respond but lack the weights of the last push."""
        stale = [each for each in self.members if each.state is ServerState.STALE]
        return [each for each in stale if not each.server.own]

    def of(self, server: ServerClient) -> ServerGroupMember | None:
        """Returns the member whose client is `server`; None if it has left the group."""
        return next((each for each in self.members if each.server is server), None)

    def named(self, name: str) -> ServerGroupMember:
        """Returns the member whose `name` is given. Raises EngineFault if the server has left the
        group or was restarted, which changes its name.
        """
        found = next((each for each in self.members if each.name == name), None)
        if found is None:
            raise EngineFault(f"{name} has left.")
        return found

    def note_fault(self, server: ServerClient, fault: EngineError) -> None:
        """Records a failure (`fault`) of a server: it gets no requests until it passes a probe."""
        if (member := self.of(server)) is not None and member.health.failed():
            log.warning("server %d is asked nothing more: %s", member.number, fault)

    def note_miss(self, member: ServerGroupMember, error: EngineError) -> None:
        """Records that a server failed to receive a push, with `error`: it gets no requests until
        it has received a complete push.
        """
        log.warning("server %d has no weights: %s", member.number, error)
        if isinstance(error, EngineFault):
            member.health.failed()
        member.health.missed()

    def note_completion(self, server: ServerClient, tokens: int) -> None:
        """Counts a valid completion of `tokens` tokens that a server returned."""
        if (member := self.of(server)) is not None:
            member.health.answered(tokens)

    def renew(self) -> list[EngineError]:
        """Updates the group: applies the server list, checks all servers, readmits remote servers
        that are back, and restarts local servers that died or hang.

        Returns the errors of local servers that did not start; these servers are marked dead.
        """
        with self._looking:
            self._follow_server_list()
            each_at_once(self._look_at, self.members)
            dead = [
                each for each in self.members if each.state is ServerState.DEAD and each.server.own
            ]
            for member in dead:
                member.health.restarting()
                member.server.close()
                member.server = self._start(member.number)
            return [error for error in each_at_once(self._came_up, dead) if error is not None]

    def find_remote_servers(self) -> None:
        """Applies the server list and admits remote servers that have joined or come back; does
        nothing during a push (`pushing`). Healthy servers are not touched.
        """
        if self._client is None:
            return
        with self._looking:
            if self.pushing:
                return
            self._follow_server_list()
            away = (ServerState.RESTARTING, ServerState.DEAD, ServerState.STALE)
            each_at_once(self._look_at, [each for each in self.members if each.state in away])

    def probe(self, member: ServerGroupMember) -> None:
        """Sends a short test request to a server and records in its health whether it replied."""
        try:
            member.server.probe(paused=member.paused)  # by an interrupted push
        except EngineError as error:
            log.warning("server %d answered no probe: %s", member.number, error)
            member.health.probed(False)
        else:
            if not member.server.own and self._identity(member.server) != member.identity:
                member.health.missed()  # it was started again since, with random weights
            member.health.probed(True)

    def measures(self) -> Metrics:
        """Returns metrics of the servers: how many are in each state, the number of faults and
        starts of all, and the number of requests and tokens that each has completed.
        """
        states = Counter(each.state for each in self.members)
        seen = {f"servers_{state}": float(states[state]) for state in ServerState}
        seen["server_faults"] = float(sum(each.health.faults for each in self.members))
        seen["server_starts"] = float(sum(each.health.starts for each in self.members))
        for each in self.members:
            seen[f"server_{each.number}_requests"] = float(each.health.requests)
            seen[f"server_{each.number}_tokens"] = float(each.health.tokens)
        return seen

    def close(self) -> None:
        self._closed.set()
        if self._keeping is not None:
            self._keeping.join()
        for member in self.members:
            member.server.close()

    def _keep_all(self) -> None:
        """Renews the run's leases of the remote servers every few seconds until the group is
        closed.
        """
        while not self._closed.wait(KEEP_SECONDS):
            away = (ServerState.DEAD, ServerState.RESTARTING)
            there = [each for each in self.members if not each.server.own]
            each_at_once(self._keep_one, [each for each in there if each.state not in away])

    def _keep_one(self, member: ServerGroupMember) -> None:
        try:
            self._keep(member.server)
        except ServerTaken as error:
            log.warning("server %d is lost: %s", member.number, error)
            member.health.absent()
        except EngineError as error:  # requests and probes will show
            log.debug("server %d was not kept: %s", member.number, error)

    def _look_at(self, member: ServerGroupMember) -> None:
        """Checks one server and updates its state: probes a suspect server, marks a dead local
        server, and readmits a remote server that was restarted or has come back.
        """
        server, health = member.server, member.health
        if server.own:
            if not server.alive:
                health.died()
            elif member.state is ServerState.SUSPECT:
                self.probe(member)
                if member.state is ServerState.SUSPECT:  # a hung server is restarted at once
                    health.died()
            return
        if member.state is ServerState.SUSPECT:
            self.probe(member)
        elif member.state is ServerState.HEALTHY and self._identity(server) != member.identity:
            self._came_back(member)  # it was started again since, with random weights
        elif member.state in (ServerState.RESTARTING, ServerState.DEAD, ServerState.STALE):
            self._came_back(member)

    def _came_back(self, member: ServerGroupMember) -> None:
        """Admits the remote server `member` if it responds and fits the run; it then waits for a
        push.
        """
        if member.state is ServerState.DEAD and not member.health.probe_is_due:
            return
        stale, member.refusal = member.state is ServerState.STALE, None
        try:
            if not member.server.there():
                member.health.absent()
                return
            if stale and member.server.identity() == member.identity:
                return  # it waits for the next push
            self._check(member.server)
            self._identify(member)
        except ServerTaken as error:
            log.warning("server %d is not taken in: %s", member.number, error)
            member.note_taken(error)
            return
        except EngineError as error:  # it does not fit: another key or vLLM version
            log.warning("server %d is not taken in: %s", member.number, error)
            member.health.absent()
            return
        member.paused = member.server.updating = False
        member.health.came()
        log.info("server %d at %s has come", member.number, member.server.address)

    def _identify(self, member: ServerGroupMember) -> None:
        """Stores the identity of the server's process, as the server reports it. Raises EngineError
        if another member has the same identity, i.e. one server has two addresses.
        """
        identity = member.server.identity()
        with self._taking_in:
            for other in self.members:
                if identity and other is not member and other.identity == identity:
                    raise EngineError(
                        f"{member.server.address} is the server at {other.server.address}. Name it once."
                    )
            member.identity, member.taken = identity, 0.0

    def _identity(self, server: ServerClient) -> str:
        with suppress(EngineError):
            return server.identity()
        return ""

    def _came_up(self, member: ServerGroupMember) -> EngineError | None:
        try:
            member.server.wait()
            self._check(member.server)
        except EngineError as error:
            member.health.died()
            return error
        member.paused = member.server.updating = False
        member.health.came()
        return None

    def _follow_server_list(self) -> None:
        """Applies the server list: adds servers with new addresses, and removes servers whose
        addresses are gone, unless the file has invalid lines.
        """
        if self._client is None:
            return
        look = (
            ServerListLook() if self._server_list is None else read_server_list(self._server_list)
        )
        for problem in look.problems:
            if problem not in self._problems:
                log.warning("%s", problem)
        self._problems = look.problems
        wanted = [*self._addresses, *look.addresses]
        for member in [each for each in self.members if not each.server.own]:
            # no server is removed by a half-written or unreadable file
            if member.server.address not in wanted and not look.problems:
                self.members.remove(member)
                log.info("server %d at %s has left", member.number, member.server.address)
                member.server.close()
        known = {each.server.address for each in self.members}
        for address in dict.fromkeys(wanted):
            if address not in known:
                self.members.append(self._member(self._client(address)))


def each_at_once(
    work: Callable[[ServerGroupMember], Any], members: Sequence[ServerGroupMember]
) -> list[Any]:
    """Calls `work` with each member, concurrently in threads. Returns the results in the order of
    `members`.
    """
    with ThreadPoolExecutor(max(1, len(members))) as pool:
        return list(pool.map(work, members))


def post_to_each(
    members: Sequence[ServerGroupMember],
    path: str,
    body: Mapping[str, Any] | None,
    failed: Callable[[ServerClient, EngineError], None],
) -> None:
    """Sends a POST request to `path`, with the JSON `body`, to all members concurrently. If a
    server fails, calls `failed` with its client and the EngineFault, which is then raised.
    """

    def post(member: ServerGroupMember) -> None:
        try:
            member.server.post(path, None if body is None else dict(body))
        except EngineFault as fault:
            failed(member.server, fault)
            raise

    each_at_once(post, members)
