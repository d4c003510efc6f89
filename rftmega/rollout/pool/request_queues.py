"""Queues that assign tasks (prompts of a generation) to engines with room, so that no engine is
idle while others have waiting tasks.

Each engine starts with its first share from `requests.order.ordered`, without communication. The
remaining tasks are a list of lists that is equal on all processes; these classes decide which
engine gets the next list. Seeds depend on the task's index, so completions are the same on any
engine.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from rftmega.rollout.requests.order import RequestOrder


class Queue(ABC):
    """Queue holds the tasks assigned to engine number `mine`; each process of that engine has a
    copy.

    The engine's first process takes tasks; on the other processes, `begun` is set to the number of
    tasks that the engine has begun.
    """

    def __init__(self, order: RequestOrder, mine: int):
        self.mine = mine
        self.given = list(order.first[mine])  # places assigned to this engine so far
        self.begun = 0  # of those given

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Returns whether this engine has begun all its tasks and is certain to be assigned no
        more.
        """

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Returns whether this engine was assigned tasks that it has not begun."""

    @abstractmethod
    def take(self, room: int) -> list[int]:
        """Returns the indices of the tasks that the engine should begin now. `room`: number of
        completions that the engine can begin; there may be a few more tasks than that.
        """

    def begin(self) -> None:
        """Marks all tasks assigned so far (`given`) as begun. It is called when the engine starts
        or restarts, since it then runs all of them that have not ended.
        """
        self.begun = len(self.given)

    def end(self) -> None:  # noqa: B027  most need no cleanup
        """Closes the queue, after every process has finished the generation."""


class Counted(Queue):
    """Counted is a queue from which an engine with room takes the next list of tasks at once. A
    counter in a store that all processes share tells which list is next.
    """

    waiting = False

    def __init__(self, order: RequestOrder, mine: int, *, board: Any, name: str):
        """Starts with the first share of engine number `mine` in `order`. `board`: a store of
        torch.distributed, in which only this counter uses the key `name`.
        """
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
    """Dealt is a queue whose tasks are assigned when the engines together decide whether there are
    enough rollouts (`stop_consensus`), after fixed numbers of engine steps. The assignment does not
    depend on time, so runs are reproducible: the same requests end with the same completions.
    """

    def __init__(self, order: RequestOrder, mine: int, *, slots: int):
        """Starts with the first share of engine number `mine` in `order`. `slots`: number of
        completions that an engine generates concurrently.
        """
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
        """Returns how many more tasks this engine should be assigned at a decision. `answered`:
        number of its finished tasks; `lately`: number of tasks finished since the last decision,
        which is added to the free slots, since about as many will finish until the next decision.
        """
        return self.slots + lately - (len(self.given) - answered)

    def deal(self, rooms: Sequence[int]) -> bool:
        """Assigns the next tasks to the engines, always to the one with the most room left. Returns
        whether any task was assigned to any engine. `rooms`: number of tasks that each engine has
        room for, equal on all processes.
        """
        left, before = list(rooms), len(self._rest)
        while self._rest and (most := max(left)) > 0:
            engine, piece = left.index(most), self._rest.popleft()
            left[engine] -= len(piece)
            if engine == self.mine:
                self.given += piece
        return len(self._rest) < before
