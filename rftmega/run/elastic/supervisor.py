"""Keeps one node of an elastic run at work: the loop of `rftmega train --elastic MIN:MAX`."""

import hashlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.core.errors import ConfigError, NodeError, RFTMegaError
from rftmega.run.elastic import decision as decisions
from rftmega.run.elastic.decision import (
    Begin,
    Finish,
    NodeLimits,
    Stop,
    Wait,
    decide,
    leads,
    may_leave,
    problem,
)
from rftmega.run.elastic.layout_choice import Layouts
from rftmega.run.elastic.membership import (
    ENDED,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    ClusterView,
    Member,
    Membership,
    Round,
    new_token,
)
from rftmega.run.elastic.node_ranks import NodeRanks, Outcome
from rftmega.run.elastic.signs import Signs
from rftmega.run.planning.fit import changed
from rftmega.runtime.parallel.nodes import versions

FOLDER = "elastic"  # in trainer.output
TRACES = "traces"  # in that
SETTLE_SECONDS = 5.0  # without a new node, before the first round begins with fewer than the most
TRIED = 1.2  # leases after which it is known whether a node that came reaches the others
FINISH_SECONDS = 60.0  # in which ranks end by themselves after the run's first rank has finished
ELSEWHERE = "192.0.2.1"  # of no host (RFC 5737)
NODES_PER_SECOND = 32.0  # nodes whose leases one node reads a second
SILENT_SECONDS = 60.0  # between two lines of a supervisor that waits


class Supervisor:
    """Supervisor runs the ranks of one node in the rounds of an elastic run."""

    def __init__(
        self,
        config: RunConfig,
        processes: int,
        limits: NodeLimits,
        work: Callable[[RunConfig, float], int],
        *,
        preload: Sequence[str],
        name: str = "",
        address: str = "",
        lease: float,
        began: Path | None = None,
    ):
        """Starts what needs no other node. `processes`: ranks of this node; `work`: what each of
        them calls, with the config of its layout and the lease; `preload`: modules that it imports.
        `name`: the node's, by default the host's; `address`: of this host, at which others reach
        it, by default that of its name; `lease`: seconds without a sign of life after which a node
        has failed; `began`: see Membership.

        Raises NodeError if `address` is not this host's.
        """
        self.config, self.limits, self.lease = config, limits, lease
        self._work = work
        folder = Path(config.trainer.output).resolve() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._ranks = NodeRanks(processes, preload)
        address, token = address or own_address(alone=limits.most == 1), new_token()
        try:
            self._signs = Signs(address, token, lease=lease)
        except OSError as error:
            raise NodeError(
                f"--address {address}: this host can't listen there: {error}. Give an address of it that the other nodes reach."
            ) from error
        member = Member(
            name or socket.gethostname(),
            token,
            address,
            free_port(address),
            self._signs.port,
            processes,
            digest(config),
        )
        self._membership = Membership(folder, member, lease=lease, began=began)
        self._layouts = Layouts(config, limits, processes, folder / f"layouts-{member.name}.json")
        self._turned = time.monotonic()  # when the loop last began anew
        self._stood = 0.0  # seconds for which this process was stopped
        self._known: dict[str, float] = {}  # a node's token -> when it was first seen
        self._round = 0  # the number of the round that this node takes part in
        self._said, self._said_at = "", 0.0
        self._asked = self._passed_on = False
        self._reached = time.monotonic()  # when the folder could last be used
        self._ended: tuple[str, str] | None = None  # state and reason that are still to be told
        self._end: Finish | None = None  # the run's end that is still to be told
        self._refusal: RFTMegaError | None = None  # what ended it here
        self._finished_at = 0.0

    @property
    def name(self) -> str:
        return self._membership.member.name

    def run(self) -> int:
        """Takes part in the run until it ends, or until a signal asks this node to leave. Returns
        the exit code.

        Raises the RFTMegaError that a rank of this node raised, and ConfigError if this node does
        not fit the others.
        """
        over = threading.Event()
        beat = threading.Thread(target=self._beat, args=(over,), name="lease", daemon=True)
        try:
            self._membership.join()
            beat.start()
            with self._signals():
                while True:
                    begin = time.monotonic()
                    code = self._turn()
                    if code is not None:
                        return code
                    pause = max(0.2, len(self._known) / NODES_PER_SECOND)
                    time.sleep(max(0.0, pause - (time.monotonic() - begin)))
        finally:
            over.set()
            self._ranks.end()
            self._layouts.close()
            self._signs.close()
            if beat.ident is not None:
                beat.join()  # else it could renew the lease once more
            self._membership.leave()

    def _turn(self) -> int | None:
        """Does what there is to do now. Returns the exit code at the end of the run."""
        self._turned = time.monotonic()
        stood, self._stood = self._stood, 0.0
        if stood and self._ranks.running:
            # the others have gone on without this node
            self._tell(f"this node stood still for {stood:.0f} s; its ranks are ended")
            self._end_ranks(FAILED, f"the node stood still for {stood:.0f} s")
        try:
            if self._membership.replaced():
                raise NodeError(
                    f"another supervisor took the name {self.name}. Give each node a --node of its own."
                )
            self._tell_ends()
            seen = self._membership.look()
            self._reached = time.monotonic()
            if seen.end is not None:
                return self._over(*seen.end)
            return self._act(seen)
        except RFTMegaError:  # some are OSErrors, too
            raise
        except OSError as error:  # a file server's may pass
            self._tell(f"the folder {self._membership.folder} can't be used: {error}", again=False)
            if time.monotonic() - self._reached > self.lease and self._ranks.running:
                # the others take this node for lost, and go on without it
                self._end_ranks(FAILED, f"the shared folder could not be used: {error}")
            return None

    def _tell_ends(self) -> None:
        """Tells the others how this node's ranks ended, and the end of the run, if that has not
        succeeded yet.
        """
        if self._ended is not None:
            state, reason = self._ended
            self._membership.tell(state=state, reason=reason, store_port=self._port())
            self._ended = None
        if self._end is not None:
            self._membership.finish(self._end.code, self._end.message)
            self._end = None
        if self._refusal is not None:
            raise self._refusal

    def _act(self, seen: ClusterView) -> int | None:
        if self._asked and not self._membership.member.leaving:
            self._membership.tell(leaving=True)
            return None
        for member in seen.alive.values():
            self._known.setdefault(member.token, time.monotonic())
        unreachable = self._signs.watch(list(seen.alive.values()), self.name)
        if unreachable != self._membership.member.unreachable:
            self._membership.tell(unreachable=unreachable)
        now = seen.round
        if now is not None and now.number > self._round:
            self._ranks.end()  # of an earlier round
            if self._mine(now):
                self._take_part(now)
                return None
        if now is not None and now.number == self._round:
            self._follow(now, seen)
        if self._ended is not None:
            return None
        self._check_fit(seen)
        leaving = self._membership.member.leaving
        if leaving and not self._ranks.running and may_leave(self.name, seen):
            return self.config.faults.requeue_code
        if leads(self.name, seen):
            self._lead(seen)
        return None

    def _mine(self, now: Round) -> bool:
        member = self._membership.member
        return (member.name, member.token) in now.members

    def _take_part(self, now: Round) -> None:
        """Starts this node's ranks in the round."""
        self._round, self._passed_on, self._finished_at = now.number, False, 0.0
        self._refuse_others(now.config, now.processes)
        self._membership.tell(round=now.number, state=RUNNING, reason="")
        config = changed(self.config, now.changes)
        layout = " ".join(f"{name}={value}" for name, value in now.changes.items())
        self._tell(
            f"round {now.number}: {len(now.members)} node(s) ({', '.join(now.names)}), "
            f"{now.processes * len(now.members)} ranks, {layout or 'the layout of the config'}: {now.reason}"
        )
        environment = {
            "MASTER_ADDR": now.address,
            "MASTER_PORT": str(now.port),
            "WORLD_SIZE": str(now.processes * len(now.members)),
        }
        first = now.processes * now.names.index(self.name)
        try:
            self._ranks.start(environment, first, self._work, config, self.lease)
        except OSError as error:
            self._end_ranks(FAILED, f"its ranks can't be started: {error}")

    def _follow(self, now: Round, seen: ClusterView) -> None:
        """Watches this node's ranks in the round."""
        if not self._ranks.running:
            return
        if seen.stop and not self._passed_on:
            self._passed_on = True
            self._tell(f"round {now.number} saves and stops: {seen.stop}")
            self._ranks.ask_to_stop()
        outcome = self._ranks.outcome()
        if outcome is None:
            if trouble := problem(seen):
                self._tell(f"round {now.number} ends: {trouble}")
                self._end_ranks(ENDED, trouble)
            return
        if outcome.refusal is not None:
            self._refusal = outcome.refusal
            self._end = Finish(outcome.refusal.exit_code, f"{self.name}: {outcome.reason}")
        elif outcome.code is None:
            self._keep(now, outcome)
            self._tell(f"{outcome.reason}; the other ranks of this node were ended")
            self._ended = FAILED, outcome.reason
        elif outcome.code == self.config.faults.requeue_code:
            self._ended = STOPPED, ""
        elif outcome.code:
            self._ended = FAILED, f"a rank returned {outcome.code}"
        else:
            self._ended = FINISHED, ""

    def _keep(self, now: Round, outcome: Outcome) -> None:
        """Writes the tracebacks of a round's dead ranks to files beside it."""
        folder = self._membership.folder / TRACES
        with suppress(OSError):  # a full disk
            folder.mkdir(exist_ok=True)
            for rank, text in outcome.traces.items():
                (folder / f"{now.number:06d}-rank-{rank}.txt").write_text(text)

    def _end_ranks(self, state: str, reason: str) -> None:
        """Ends this node's ranks; the others are told by `_tell_ends`."""
        self._ranks.end()
        self._ended = state, reason

    def _port(self) -> int:
        """Returns a port for the next round's rendezvous, the last one if none can be found."""
        with suppress(OSError):
            return free_port(self._membership.member.address)
        return self._membership.member.store_port

    def _check_fit(self, seen: ClusterView) -> None:
        """Raises ConfigError if this node can't train with the others, which were there before."""
        now = seen.round
        if now is not None and decisions.lost(now, seen) != list(now.names):
            self._refuse_others(now.config, now.processes)
            return
        first = min(seen.alive.values(), key=lambda member: (member.joined, member.token))
        if first.joined:
            self._refuse_others(first.config, first.processes)

    def _refuse_others(self, config: str, processes: int) -> None:
        own = self._membership.member
        if processes != own.processes:
            raise ConfigError(
                f"--processes {own.processes} here, {processes} on the other nodes. All nodes must have the same number."
            )
        if config != own.config:
            raise ConfigError(
                "The config, or the version of a package, differs on this node from the others. Start all nodes with the same "
                "file, options and environment."
            )

    def _lead(self, seen: ClusterView) -> None:
        """Does what the nodes as a whole do next."""
        now = time.monotonic()
        newest = max((self._known[member.token] for member in seen.alive.values()), default=now)
        settled = now - newest >= SETTLE_SECONDS
        found = decide(
            seen,
            self.limits,
            settled=settled,
            requeue_code=self.config.faults.requeue_code,
            usable=self._layouts.known,
            tried=[
                name
                for name, member in seen.alive.items()
                if now - self._known[member.token] > TRIED * self.lease
            ],
            progressed=seen.round is not None and seen.round.checkpoint != self._latest(),
        )
        if isinstance(found, Wait):
            if found.reason:
                self._tell(f"waiting: {found.reason}", again=False)
            else:
                self._layouts.prepare()
        elif isinstance(found, Stop):
            assert seen.round is not None
            self._membership.ask_to_stop(seen.round.number, found.reason)
        elif isinstance(found, Finish):
            self._finish(found)
        else:
            self._begin(found, seen)

    def _finish(self, found: Finish) -> None:
        if self._ranks.running and found.code == 0:
            self._finished_at = self._finished_at or time.monotonic()
            if time.monotonic() - self._finished_at < FINISH_SECONDS:
                return
        self._end = found

    def _begin(self, found: Begin, seen: ClusterView) -> None:
        """Creates the next round, with as many of the candidates as there is a layout for."""
        try:
            size, changes = self._layouts.best(len(found.candidates))
        except ConfigError as error:
            self._refusal, self._end = error, Finish(error.exit_code, f"{self.name}: {error}")
            return
        chosen = [seen.alive[name] for name in found.candidates[:size]]
        before = seen.round
        latest = self._latest()
        failures = 0
        if found.failed and before is not None and before.checkpoint == latest:
            failures = before.failures + 1
        self._membership.begin(
            Round(
                1 if before is None else before.number + 1,
                tuple((member.name, member.token) for member in chosen),
                self._membership.member.processes,
                self._membership.member.config,
                changes,
                chosen[0].address,
                chosen[0].store_port,
                found.reason,
                failures,
                latest,
            )
        )

    def _latest(self) -> str:
        """Returns the name of the run's latest checkpoint; empty if there is none."""
        folder = self.config.checkpoint.folder or f"{self.config.trainer.output}/checkpoints"
        with suppress(OSError):
            return (Path(folder) / "latest").read_text().strip()
        return ""

    def _over(self, code: int, message: str) -> int:
        """Waits for ranks that end by themselves, ends the others, and returns the exit code."""
        end = time.monotonic() + (FINISH_SECONDS if code == 0 else 0.0)
        while self._ranks.running and time.monotonic() < end and self._ranks.outcome() is None:
            time.sleep(0.1)
        if code:
            self._tell(f"the run ends with {code}: {message}")
        return code

    def _beat(self, over: threading.Event) -> None:
        """Renews the lease while the loop turns, and notes for how long it could not."""
        last = time.monotonic()
        while not over.wait(self.lease / 5):
            last, before = time.monotonic(), last
            if last - before > self.lease:  # the process was stopped, or its machine
                self._stood = last - before
            # a loop that starts ranks may take a while; one that hangs must not look alive
            if time.monotonic() - self._turned < 6 * self.lease:
                with suppress(OSError):
                    self._membership.touch()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Makes SIGTERM and SIGUSR1 ask this node to leave within a `with` block."""

        def leave(number: int, frame: Any) -> None:
            self._asked = True

        before = {
            number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, text: str, *, again: bool = True) -> None:
        """Prints a line; with `again=False`, the same line at most once a minute."""
        now = time.monotonic()
        if not again and text == self._said and now - self._said_at < SILENT_SECONDS:
            return
        self._said, self._said_at = text, now
        sys.stdout.write(f"[{self.name}] {text}\n")
        sys.stdout.flush()


def digest(config: RunConfig) -> str:
    """Returns a digest of all options and of the versions of packages, which must be the same on all
    nodes.
    """
    said = json.dumps([asdict(config), versions()], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def own_address(*, alone: bool = False) -> str:
    """Returns an address of this host: the one that its name stands for, unless only this host can
    reach that; then the one from which it would reach other networks. Without one, or for a run that
    is `alone` on one node: 127.0.0.1.
    """
    if alone:
        return "127.0.0.1"
    with suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):
            return found
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def free_port(address: str) -> int:
    """Returns a TCP port of this host that is free at `address`."""
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
