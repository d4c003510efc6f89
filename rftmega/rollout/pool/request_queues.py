"""Queues that assign unstarted tasks to engines with room, so that no engine idles while others
have waiting tasks.

Each engine starts with its own share from `requests.order.ordered`, without communication. The rest
is a list that is equal on all processes; these classes decide which engine gets its next piece.
Seeds depend on the place, so completions are the same on any engine.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from rftmega.rollout.requests.order import RequestOrder


class Queue(ABC):
    """Queue holds the tasks of engine number `mine`, on each of its processes.

    The engine's first process takes tasks; the others set `begun` to the number it has begun.
    """

    def __init__(self, order: RequestOrder, mine: int):
        self.mine = mine
        self.given = list(order.first[mine])  # places assigned to this engine so far
        self.begun = 0  # of those given

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Returns whether this engine is known to get no more tasks."""

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Returns whether this engine has tasks that it has not begun."""

    @abstractmethod
    def take(self, room: int) -> list[int]:
        """Returns the places that the engine should begin now, given room for so many completions;
        a piece may exceed that.
        """

    def begin(self) -> None:
        """Records that the engine begins all `given` tasks without completions, at first or after a
        restart.
        """
        self.begun = len(self.given)

    def end(self) -> None:  # noqa: B027  most need no cleanup
        """Closes the queue: every process has finished the rollout."""


class Counted(Queue):
    """Counted lets engines with room take pieces by a shared counter, without waiting for each
    other.
    """

    waiting = False

    def __init__(self, order: RequestOrder, mine: int, *, board: Any, name: str):
        """`board`: a store of torch.distributed, in which only this counter uses `name`."""
        super().__init__(order, mine)
        self.board, self.name = board, name
        self._rest, self._empty = order.rest, not order.rest

    @property
    def empty(self) -> bool:
        return self._empty

    def take(self, room: int) -> list[int]:
        found = list[int]()
        while len(found) < room and not self._empty:
            number = self.board.add(self.name, 1) - 1
            self._empty = number >= len(self._rest)
            found += [] if self._empty else self._rest[number]
        self.given += found
        return found

    def end(self) -> None:
        if self.mine == 0 and self._rest:
            self.board.delete_key(self.name)


class Dealt(Queue):
    """Dealt assigns pieces when engines decide together whether they have enough
    (`stop_consensus`). The assignment does not depend on time, so runs are reproducible: the same
    requests end with the same completions.
    """

    def __init__(self, order: RequestOrder, mine: int, *, slots: int):
        """`slots`: completions that an engine generates concurrently."""
        super().__init__(order, mine)
        self.slots = slots
        self._rest = deque(order.rest)

    def take(self, room: int) -> list[int]:
        found = self.given[self.begun : self.begun + room]
        self.begun += len(found)
        return found

    @property
    def empty(self) -> bool:
        return not self.waiting and not self._rest

    @property
    def waiting(self) -> bool:
        return self.begun < len(self.given)

    def room(self, answered: int, lately: int) -> int:
        """Returns how many requests the engine has room for, of which `answered` are finished. The
        number finished `lately`, since the last decision, is added: about as many will finish until
        the next one.
        """
        return self.slots + lately - (len(self.given) - answered)

    def deal(self, rooms: Sequence[int]) -> bool:
        """Deals pieces to engines with room. Returns whether any was dealt.

        All processes pass the same `rooms`, by engine.
        """
        left, before = list(rooms), len(self._rest)
        while self._rest and (most := max(left)) > 0:
            engine, piece = left.index(most), self._rest.popleft()
            left[engine] -= len(piece)
            if engine == self.mine:
                self.given += piece
        return len(self._rest) < before
