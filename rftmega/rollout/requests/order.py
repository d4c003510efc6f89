"""Orders requests for engines, longest first, for balanced load: each engine gets a first share,
and further requests when it has room.
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
    """RequestOrder holds the indices of requests: `first` has the requests that each engine begins
    at once, `rest` the remaining requests in the order in which they should begin.

    An engine with room takes one list of `rest` at a time: neighbouring requests with the same
    prompt, which share their prefix cache on one engine.
    """

    first: list[list[int]]
    rest: list[list[int]]


def ordered(
    prompts: Sequence[Prompt] | Sequence[Request],
    expected: Sequence[float],
    engines: int,
    slots: int,
) -> RequestOrder:
    """Orders requests by `expected`, their expected numbers of tokens, longest first. The `engines`
    engines are assigned requests of about the same total expected length; an engine begins the
    first `slots` of its requests at once, or a few more if these share a prompt.

    Requests are assigned in groups of neighbours with equal prompts, each to the engine with the
    least load (Graham, Bounds on multiprocessing timing anomalies, 1969). The groups get smaller
    towards the end (Polychronopoulos and Kuck, Guided self-scheduling, 1987), so that no engine
    runs alone at the end.
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
    """Splits runs of requests and yields the parts. `largest` returns the most requests of a part,
    given the number of requests left; a part has at least one.
    """
    left = sum(len(run) for run in runs)
    for run in runs:
        begin = 0
        while begin < len(run):
            piece = run[begin : begin + max(1, largest(left))]
            yield piece
            begin += len(piece)
            left -= len(piece)


class Waiting:
    """Waiting holds the requests that have not begun, when one process serves all engines."""

    def __init__(self, order: RequestOrder):
        self._own = [deque(places) for places in order.first]
        # further turns: the engine of the first turns has them in its cache
        self._further = [deque[int]() for _ in order.first]
        self._rest = deque(order.rest)

    def add(self, number: int, place: int) -> None:
        """Adds request `place`, a later turn of a rollout; only engine `number` may begin it."""
        self._further[number].append(place)

    def withdrawn(self, number: int) -> list[int]:
        """Removes and returns the later turns that engine `number` has not begun."""
        left = list(self._further[number])
        self._further[number].clear()
        return left

    def taken(self, room: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Yields (engine number, request index) of the requests to begin. `room`: how many requests
        each engine can begin. An engine first gets its later turns and its own share, then a list
        of `RequestOrder.rest`, and finally requests from the share of an engine without room.
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
