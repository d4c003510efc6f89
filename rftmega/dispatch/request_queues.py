"""Assigns requests that no engine has begun to whichever has room, so that none runs dry while
others have requests waiting.

Engines begin with what `request_order.ordered` gives each of them, and no process asks another one
for that. What is left is a list that is the same everywhere; these classes tell who gets its next
piece. Seeds go by the place, so answers are the same whoever gives them.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from rftmega.errors import EngineFault
from rftmega.rollout.request_order import RequestOrder

LOOK = 0.0005  # seconds between two looks of a process at what the first of its engine has taken


class Queue(ABC):
    """Requests of the engine of number `mine`, as each of its processes holds them."""

    def __init__(self, order: RequestOrder, mine: int):
        self.mine = mine
        self.given = list(order.first[mine])  # places that are this engine's so far

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Returns whether this engine is known to get nothing more."""

    @abstractmethod
    def take(self, room: int) -> list[int]:
        """Returns the places that the engine is to begin now, where it has room for so many
        answers; a piece may be larger than that.
        """

    def begin(self) -> None:  # noqa: B027  most need nothing
        """Notes that the engine is asked for all that is `given` and not answered, at first or once
        more.
        """

    def broke(self) -> None:  # noqa: B027
        """Notes that the engine has broken down, as this process sees it."""

    def end(self) -> None:  # noqa: B027
        """Ends the queue: every process is through with the rollout."""


class Counted(Queue):
    """Engines take pieces when they have room, by a count that they share: no engine waits for
    another.
    """

    def __init__(
        self,
        order: RequestOrder,
        mine: int,
        *,
        board: Any,
        name: str,
        speaks: bool = True,
        alone: bool = True,
    ):
        """`board`: a store of torch.distributed, where this rollout alone has the `name`. Processes
        of one engine, of which one `speaks`, take what that one took, in the same order: they ask
        after the same steps. `alone`: it is the engine's only one.
        """
        super().__init__(order, mine)
        self.board, self.name, self.speaks, self.alone = board, name, speaks, alone
        self._rest, self._empty = order.rest, not order.rest
        self._attempt = self._turn = 0
        self._said = list[str]()  # keys at the board

    @property
    def empty(self) -> bool:
        return self._empty

    def begin(self) -> None:
        self._attempt, self._turn = self._attempt + 1, 0

    def take(self, room: int) -> list[int]:
        found = list[int]()
        while len(found) < room and not self._empty:
            number = self._next()
            self._empty = number >= len(self._rest)
            found += [] if self._empty else self._rest[number]
        self.given += found
        return found

    def broke(self) -> None:
        if self.speaks and not self.alone:
            self._say("broke", 1)

    def end(self) -> None:
        if self.speaks:
            for key in [*self._said, *([self.name] if self.mine == 0 and self._rest else [])]:
                self.board.delete_key(key)

    def _next(self) -> int:
        """Returns the number of a piece that is nobody else's; too high where there is none."""
        if self.alone:
            return self._counted()
        self._turn, turn = self._turn + 1, str(self._turn)
        if self.speaks:
            number = self._counted()
            self._say(turn, number)
            return number
        # a collective would wait for a first process that broke down
        while not self.board.check([self._key(turn)]):
            if self.board.check([self._key("broke")]):
                raise EngineFault("The first process of this engine broke down.")
            time.sleep(LOOK)
        return int(self.board.get(self._key(turn)))

    def _counted(self) -> int:
        number: int = self.board.add(self.name, 1)
        return number - 1

    def _key(self, what: str) -> str:
        return f"{self.name}/{self.mine}/{self._attempt}/{what}"

    def _say(self, what: str, number: int) -> None:
        self.board.set(self._key(what), str(number))
        self._said.append(self._key(what))


class Dealt(Queue):
    """Pieces are dealt when engines decide together whether they have enough (`early_stop`), so
    time plays no part in who gets which: the same requests end with the same answers, run after
    run.
    """

    def __init__(self, order: RequestOrder, mine: int, *, slots: int):
        """`slots`: answers that an engine generates side by side."""
        super().__init__(order, mine)
        self.slots = slots
        self._rest = deque(order.rest)
        self._begun = 0  # of those given

    def begin(self) -> None:
        self._begun = len(self.given)

    def take(self, room: int) -> list[int]:
        found = self.given[self._begun : self._begun + room]
        self._begun += len(found)
        return found

    @property
    def empty(self) -> bool:
        return not self.waiting and not self._rest

    @property
    def waiting(self) -> bool:
        """Returns whether something was dealt to this engine that it has not begun."""
        return self._begun < len(self.given)

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
