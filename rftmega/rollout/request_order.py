"""Orders the requests of engines: which each begins with, and then the rest, long answers first, so
that none is left over.
"""

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rftmega.types import Completion, Prompt

REMEMBERED = 2**18  # prompts: 4 MiB of a checkpoint
# an engine gets at least so many where there are enough requests: fewer could not be balanced
PIECES = 4


class Lengths:
    """Lengths estimates how many tokens the answers to a prompt have."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        """`limit`: prompts that are remembered, the latest."""
        self.limit = limit
        # of a prompt: mean of its latest answers; who was asked last is last
        self._answers: dict[int, float] = {}
        # of all prompts and answers so far, each prompt counted with each of its answers
        self._tokens = [0, 0]

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """Returns the mean length of each prompt's latest answers; a new one's own length, scaled
        by answer over prompt.
        """
        asked, answered = self._tokens
        scale = answered / asked if asked else 1.0
        known: dict[tuple[int, ...], float] = {}
        for prompt in prompts:
            if prompt.token_ids not in known:
                known[prompt.token_ids] = self._answers.get(
                    _key(prompt), len(prompt.token_ids) * scale
                )
        return [known[prompt.token_ids] for prompt in prompts]

    def learn(self, prompts: Sequence[Prompt], completions: Sequence[Completion | None]) -> None:
        """Remembers the answers; a prompt of which one was broken off (None) stays as it was: its
        short ones alone mislead.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        broken = {
            prompt.token_ids
            for prompt, answer in zip(prompts, completions, strict=True)
            if answer is None
        }
        for prompt, answer in zip(prompts, completions, strict=True):
            if answer is not None and prompt.token_ids not in broken:
                found.setdefault(prompt.token_ids, []).append(len(answer.token_ids))
        for ids, lengths in found.items():
            key = _key(Prompt(ids))
            self._answers.pop(key, None)
            self._answers[key] = sum(lengths) / len(lengths)
            self._tokens[0] += len(ids) * len(lengths)
            self._tokens[1] += sum(lengths)
        for key in list(itertools.islice(self._answers, max(0, len(self._answers) - self.limit))):
            del self._answers[key]

    def state(self) -> dict[str, Any]:
        """Returns all that a resume needs to send the same requests in the same order: 16 bytes a
        prompt.
        """
        prompts = torch.tensor(list(self._answers), dtype=torch.int64)
        means = torch.tensor(list(self._answers.values()), dtype=torch.float64)
        return {"prompts": prompts, "means": means, "tokens": list(self._tokens)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if "answers" in state:  # of a checkpoint of format 2
            self._answers = {
                _number(bytes.fromhex(key)): mean for key, mean in state["answers"].items()
            }
        else:
            self._answers = dict(
                zip(state["prompts"].tolist(), state["means"].tolist(), strict=True)
            )
        self._tokens = list(state["tokens"])


class RequestOrder(NamedTuple):
    """Places of requests: those that each engine begins at once, and the others, in the order in
    which they should be begun.

    Of the others whoever has room takes a piece, neighbours with the same prompt, which share the
    prompt's cache in one engine.
    """

    first: list[list[int]]
    rest: list[list[int]]


def ordered(
    prompts: Sequence[Prompt], expected: Sequence[float], engines: int, slots: int
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
        self._rest = deque(order.rest)

    def taken(self, room: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Returns the number of an engine, and the place, of what begins where there is `room`: an
        engine's own first, a piece of what is left then, and, when all are served, what another one
        has and can't begin.
        """
        left = dict(room)
        for take in (self._next, self._anothers):
            for number in left:
                while left[number] > 0 and (source := take(number)):
                    left[number] -= 1
                    yield number, source.popleft()

    def _next(self, number: int) -> deque[int]:
        own = self._own[number]
        if not own and self._rest:
            own.extend(self._rest.popleft())
        return own

    def _anothers(self, number: int) -> deque[int]:
        return max(self._own, key=len)


def _key(prompt: Prompt) -> int:
    """Hashes a prompt to eight bytes."""
    return _number(
        hashlib.blake2b(",".join(map(str, prompt.token_ids)).encode(), digest_size=8).digest()
    )


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, signed=True)
