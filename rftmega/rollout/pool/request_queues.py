"""Assigns tasks that no engine has begun to whichever has room, so that none runs dry while others
have tasks waiting.

Engines begin with what `requests.order.ordered` gives each of them, and no process asks another one
for that. What is left is a list that is the same everywhere; these classes tell who gets its next
piece. Seeds go by the place, so answers are the same whoever gives them.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from rftmega.rollout.requests.order import RequestOrder


class Queue(ABC):
    """Tasks of the engine of number `mine`, as each of its processes holds them.

    The engine's first process takes them; the others set `begun` to what it has by then.
    """

    def __init__(self, order: RequestOrder, mine: int):
        self.mine = mine
        self.given = list(order.first[mine])  # places that are this engine's so far
        self.begun = 0  # of those given

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Returns whether this engine is known to get nothing more."""

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Returns whether something is given to this engine that it has not begun."""

    @abstractmethod
    def take(self, room: int) -> list[int]:
        """Returns the places that the engine is to begin now, where it has room for so many
        answers; a piece may be larger than that.
        """

    def begin(self) -> None:
        """Notes that the engine begins all that is `given` and not answered, at first or once more."""
        self.begun = len(self.given)

    def end(self) -> None:  # noqa: B027  most need nothing
        """Ends the queue: every process is through with the rollout."""


class Counted(Queue):
    """Engines take pieces when they have room, by a count that they share: no engine waits for
    another.
    """

    waiting = False

    def __init__(self, order: RequestOrder, mine: int, *, board: Any, name: str):
        """`board`: a store of torch.distributed, where this count alone has the `name`."""
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
    """Pieces are dealt when engines decide together whether they have enough (`stop_consensus`), so
    time plays no part in who gets which: the same requests end with the same answers, run after
    run.
    """

    def __init__(self, order: RequestOrder, mine: int, *, slots: int):
        """`slots`: answers that an engine generates side by side."""
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
        """Returns for how many requests the engine has room, having `answered` so many: as many as
        it finished `lately`, since the last time, more than now, for until the next time it will
        finish about as many.
        """
        return self.slots + lately - (len(self.given) - answered)

    def deal(self, rooms: Sequence[int]) -> bool:
        """Deals pieces to engines with room; returns whether any was dealt.

        All processes give the same `rooms`, by engine.
        """
        left, before = list(rooms), len(self._rest)
        while self._rest and (most := max(left)) > 0:
            engine, piece = left.index(most), self._rest.popleft()
            left[engine] -= len(piece)
            if engine == self.mine:
                self.given += piece
        return len(self._rest) < before
