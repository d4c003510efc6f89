"""Orders requests, longest first, and divides them among engines for a balanced load: each engine
begins with a first share, and gets further requests when it has room.
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
    """RequestOrder is a plan of the order in which engines begin requests, as lists of request
    indices: `first` has, for each engine, the requests that it begins at once; `rest` has the
    remaining requests in the order in which they should begin.

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
    """Plans which engine begins which requests and when, longest first. The first shares have about
    the same total expected length.

    `expected`: expected tokens of each completion, or anything proportional; `engines`: number of
    engines; `slots`: how many requests an engine begins at once, or a few more if these share a
    prompt.

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
    """Splits each of `runs`, lists of requests with equal prompts, into parts and yields the parts.
    `largest` returns the most requests of a part, given the number of requests not yet yielded; a
    part has at least one.
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
    """Waiting holds the requests that no engine has begun, when one process sends the requests of
    all engines.
    """

    def __init__(self, order: RequestOrder):
        self._own = [deque(places) for places in order.first]
        # further turns: the engine of the first turns has them in its cache
        self._further = [deque[int]() for _ in order.first]
        self._rest = deque(order.rest)

    def add(self, number: int, place: int) -> None:
        """Adds a later turn of a rollout, the request with index `place`; only engine `number`,
        which served the earlier turns, may begin it.
        """
        self._further[number].append(place)

    def withdrawn(self, number: int) -> list[int]:
        """Removes and returns the indices of the later turns that engine `number` has not begun."""
        left = list(self._further[number])
        self._further[number].clear()
        return left

    def taken(self, room: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Yields (engine number, request index) for each request that should begin now. `room`:
        number of requests that each engine can begin, by engine number. An engine first gets its
        later turns and its first share, then a list of `RequestOrder.rest`, and finally requests
        from the share of another engine.
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
