"""Orders the requests of engines: which each begins with, and then the rest, long answers first, so
that none is left over.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rftmega.core.types import Prompt
from rftmega.rollout.requests import Request

# an engine gets at least so many where there are enough requests: fewer could not be balanced
PIECES = 4


class RequestOrder(NamedTuple):
    """Places of requests: those that each engine begins at once, and the others, in the order in
    which they should be begun.

    Of the others whoever has room takes a piece, neighbours with the same prompt, which share the
    prompt's cache in one engine.
    """

    first: list[list[int]]
    rest: list[list[int]]


def ordered(
    prompts: Sequence[Prompt] | Sequence[Request],
    expected: Sequence[float],
    engines: int,
    slots: int,
) -> RequestOrder:
    """Orders requests, the longest expected first. Engines get requests of about the same expected
    length in all, of which each begins `slots`, or as many more as its last piece has.

    Whoever has least gets the next (Graham, Bounds on multiprocessing timing anomalies, 1969).
    Pieces are the smaller the less is left behind them (Polychronopoulos and Kuck, Guided
    self-scheduling, 1987), so that none is begun alone at the end.
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
    """Pieces of the runs, each of at most `largest` (of what is left then), and at least one."""
    left = sum(len(run) for run in runs)
    for run in runs:
        begin = 0
        while begin < len(run):
            piece = run[begin : begin + max(1, largest(left))]
            yield piece
            begin += len(piece)
            left -= len(piece)


class Waiting:
    """Requests that no engine has begun, where one process asks all engines."""

    def __init__(self, order: RequestOrder):
        self._own = [deque(places) for places in order.first]
        # further turns: the engine that has the first ones has them in its cache
        self._further = [deque[int]() for _ in order.first]
        self._rest = deque(order.rest)

    def add(self, number: int, place: int) -> None:
        """Adds a further turn, which engine `number` alone begins."""
        self._further[number].append(place)

    def withdrawn(self, number: int) -> list[int]:
        """Returns the further turns that engine `number` has not begun, which it no longer has."""
        left = list(self._further[number])
        self._further[number].clear()
        return left

    def taken(self, room: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Returns the number of an engine, and the place, of what begins where there is `room`: an
        engine's further turns and its own first, a piece of what is left then, and, when all are served, what another one
        has and can't begin.
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
