"""Orders requests for engines: the first share of each engine, and then the rest, longest first,
for balanced load.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rftmega.core.types import Prompt
from rftmega.rollout.requests import Request

# minimum pieces per engine, if there are enough requests: fewer could not be balanced
PIECES = 4


class RequestOrder(NamedTuple):
    """RequestOrder holds the places of requests: those that each engine begins at once, and the
    rest in the order in which they should begin.

    An engine with room takes a piece of the rest: neighbours with the same prompt, which share its
    prefix cache on one engine.
    """

    first: list[list[int]]
    rest: list[list[int]]


def ordered(
    prompts: Sequence[Prompt] | Sequence[Request],
    expected: Sequence[float],
    engines: int,
    slots: int,
) -> RequestOrder:
    """Orders requests, the longest expected first. Engines get requests of about the same total
    expected length, of which each begins `slots`, or more by the rest of its last piece.

    The engine with the least load gets the next piece (Graham, Bounds on multiprocessing timing
    anomalies, 1969). Pieces shrink towards the end (Polychronopoulos and Kuck, Guided
    self-scheduling, 1987), so that no engine runs alone at the end.
    """
    runs = [
        list(run)
        for _, run in itertools.groupby(
            range(len(prompts)), key=lambda place: prompts[place].token_ids
        )
    ]
    runs.sort(key=lambda run: -expected[run[0]])  # stable: of equals the first
    parts = PIECES * engines
    first: list[list[int]] = [[] for _ in range(engines)]
    loads = [0.0] * engines
    rest = list[list[int]]()
    for piece in _cut(runs, lambda left: len(prompts) // parts):
        least = loads.index(min(loads))
        loads[least] += sum(expected[place] for place in piece)
        if len(first[least]) < slots:
            first[least] += piece
        else:
            rest.append(piece)
    return RequestOrder(first, list(_cut(rest, lambda left: left // parts)))


def _cut(runs: Sequence[list[int]], largest: Callable[[int], int]) -> Iterator[list[int]]:
    """Yields pieces of the runs, each of at most `largest` of the number left, and at least one."""
    left = sum(len(run) for run in runs)
    for run in runs:
        begin = 0
        while begin < len(run):
            piece = run[begin : begin + max(1, largest(left))]
            yield piece
            begin += len(piece)
            left -= len(piece)


class Waiting:
    """Waiting holds the unstarted requests when one process serves all engines."""

    def __init__(self, order: RequestOrder):
        self._own = [deque(places) for places in order.first]
        # further turns: the engine of the first turns has them in its cache
        self._further = [deque[int]() for _ in order.first]
        self._rest = deque(order.rest)

    def add(self, number: int, place: int) -> None:
        """Adds a further turn, which only engine `number` may begin."""
        self._further[number].append(place)

    def withdrawn(self, number: int) -> list[int]:
        """Removes and returns the further turns that engine `number` has not begun."""
        left = list(self._further[number])
        self._further[number].clear()
        return left

    def taken(self, room: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Yields (engine number, place) of the requests to begin, given the `room` of each engine:
        first the engine's further turns and own requests, then a piece of the rest, and finally
        requests that another engine has no room for.
        """
        left = dict(room)
        for take in (self._next, self._anothers):
            for number in left:
                while left[number] > 0 and (source := take(number)):
                    left[number] -= 1
                    yield number, source.popleft()

    def _next(self, number: int) -> deque[int]:
        if self._further[number]:
            return self._further[number]
        own = self._own[number]
        if not own and self._rest:
            own.extend(self._rest.popleft())
        return own

    def _anothers(self, number: int) -> deque[int]:
        return max(self._own, key=len)
