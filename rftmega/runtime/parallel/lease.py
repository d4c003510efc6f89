"""Logs which rank makes no progress while the others wait for it (`watchdog.watched` can end such a
run).
Each process writes to the rendezvous store when it last made progress, and which line its main
thread executes; the first process reads these heartbeats. Ranks that wait for another rank make no
progress either, so a message is logged only if no rank makes progress, and names the ranks that do
not wait in a collective.
"""

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.watchdog import seen

LIMIT = 60.0  # seconds
STARTING = 5  # times the limit while a run starts: on a GPU its engine compiles for minutes
ROUND = 5.0
NAMED = 4  # most ranks that are named
WAITING = ("torch/distributed/", "megatron/core/pipeline_parallel/p2p_communication")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign is one heartbeat of one process: the seconds since it last made progress, its phase, and
    the line of code that its main thread executes.
    """

    number: int
    idle: float  # seconds since its last mark
    phase: str
    host: str
    at: str  # the innermost line of its main thread
    waits: bool  # in a collective, for other processes

    @classmethod
    def present(cls, number: int) -> "Sign":
        """Returns a new heartbeat of this process, with the given sequence number."""
        frames = list(_frames(sys._current_frames().get(threading.main_thread().ident or 0)))
        at = (
            f"{frames[0].f_code.co_filename}:{frames[0].f_lineno} ({frames[0].f_code.co_name})"
            if frames
            else "its end"
        )
        waits = any(part in frame.f_code.co_filename for frame in frames for part in WAITING)
        return cls(number, time.monotonic() - seen.at, seen.phase, socket.gethostname(), at, waits)


class Lease:
    """Lease exchanges heartbeats between the processes, and finds the ranks that keep all others
    waiting.
    """

    def __init__(self, rank: int, size: int, board: Any, *, limit: float = LIMIT):
        """`rank`: rank of this process; `size`: number of processes.

        `board`: the store of torch.distributed in which heartbeats are exchanged, or None for a
        single process; `limit`: seconds without progress after which a rank is reported.
        """
        self.rank, self.size, self.board, self.limit = rank, size, board, limit
        self.number = 0
        self._heard: dict[int, tuple[Sign, float]] = {}  # last heartbeat of a rank, and its arrival
        self._next = limit  # idle seconds at which ranks are named

    def tell(self) -> None:
        """Writes this process's heartbeat to the store."""
        self.number += 1
        sign = Sign.present(self.number)
        if self.board is None:
            self._heard[self.rank] = sign, time.monotonic()
        else:
            self.board.set(_key(self.rank), json.dumps(asdict(sign)))

    def look(self) -> str:
        """Reads the heartbeats of all ranks, on the first process only, and returns a log message
        that names the ranks that make no progress.

        Returns an empty string if all ranks make progress, or if the message was returned already.
        """
        now = time.monotonic()
        if self.board is not None:
            self._receive(now)
        silent = {
            rank: now - came for rank, (_, came) in self._heard.items() if now - came > self.limit
        }
        idle = {rank: sign.idle + now - came for rank, (sign, came) in self._heard.items()}
        longest = max(silent.values(), default=0.0) or min(idle.values(), default=0.0)
        starts = not silent and all(sign.phase == "start" for sign, _ in self._heard.values())
        if starts and longest <= STARTING * self.limit:
            return ""
        if longest <= self.limit:
            self._next = self.limit
        if longest <= self._next:
            return ""
        self._next = 2 * longest
        if silent:
            return (
                self._said(list(silent), "gave no sign of life", silent)
                + ": its process or its host is stopped, or gone"
            )
        working = [rank for rank, (sign, _) in self._heard.items() if not sign.waits]
        return self._said(working or list(idle), "stands still, no progress", idle)

    def _receive(self, now: float) -> None:
        for rank in range(self.size):
            if not self.board.check([_key(rank)]):
                continue
            sign = Sign(**json.loads(self.board.get(_key(rank))))
            if rank not in self._heard or self._heard[rank][0].number != sign.number:
                self._heard[rank] = sign, now

    def _said(self, ranks: Sequence[int], what: str, seconds: dict[int, float]) -> str:
        parts = []
        for rank in sorted(ranks, key=lambda rank: -seconds[rank])[:NAMED]:
            sign = self._heard[rank][0]
            parts.append(
                f"rank {rank} on {sign.host} {what} for {seconds[rank]:.0f} s in the phase {sign.phase}, at {sign.at}"
            )
        more = f"; and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
        return "; ".join(parts) + more


@contextmanager
def named(
    world: World, *, limit: float | None = None, pause: float | None = None
) -> Iterator[None]:
    """Logs within a `with` block, on the first process, which ranks make no progress for longer
    than `limit` seconds (default LIMIT), and again each time the idle time has doubled.
    Each process writes its heartbeat every `pause` seconds (default ROUND).
    """
    # A separate connection: one that waits for a key, e.g. while a process joins a group, can do
    # nothing else.
    board = preemption.request.board.clone() if preemption.request.board is not None else None
    over, standing = (
        threading.Event(),
        Lease(world.rank, world.size, board, limit=limit or LIMIT),
    )

    def watch() -> None:
        while not over.wait(pause or ROUND):
            try:
                standing.tell()
                said = standing.look() if world.is_main else ""
            except RuntimeError:  # the store's server has ended; its launcher reports why
                return
            if said:
                log.warning("%s. docs/fault_tolerance.md says what to do.", said)

    thread = threading.Thread(target=watch, daemon=True, name="standing")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _key(rank: int) -> str:
    return f"sign of life of rank {rank}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
