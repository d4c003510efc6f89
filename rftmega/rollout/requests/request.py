"""Requests for completions, and the interface through which an engine receives them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rftmega.core.media_positions import Placed
from rftmega.core.types import Completion, Prompt
from rftmega.rollout.requests.partial_completion import PartialCompletion


class Request(NamedTuple):
    """Request asks an engine for one completion of the context `token_ids`."""

    token_ids: Sequence[int]
    seed: int
    rollout: int = 0  # requests of one rollout stay on one server
    expected: float = 0.0  # tokens of the completion; used to balance servers
    # in the tokens, which have a placeholder for each feature
    images: tuple[Placed, ...] = ()
    most: int = 0  # maximum tokens of the completion; 0: the engine's limit
    answered: int = 0  # number of tokens at the end of `token_ids` that begin the completion

    def limit(self, longest: int, row_tokens: int = sys.maxsize) -> int:
        """Returns how many more tokens an engine may generate: the request's limit or, if smaller,
        `longest`, the engine's own limit on a completion, less the tokens generated before; and no
        more than fit into a row of `row_tokens`, the context included.
        """
        left = (min(self.most, longest) if self.most else longest) - self.answered
        return min(left, row_tokens - len(self.token_ids))


class Requests(Protocol):
    """Requests is the interface of a source of requests that an engine serves: the engine takes
    further requests while it generates earlier ones, and returns the completions.

    If an engine has several processes, each of them calls every method after the same engine steps.
    """

    wants_parts: bool  # whether `broken_off` should be called

    def take(self, room: int) -> Sequence[Request]:
        """Returns further requests for an engine that can begin `room` more, sometimes a few more
        than `room`; an empty sequence if there are none at the moment.

        Requests are numbered from 0 in the order in which they are returned. An engine is done when
        it has no unfinished requests and gets none here.
        """

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Receives completions from the engine as soon as they are finished, each once. `numbers`:
        the number of each completion's request, see `take`.
        """

    def stopped(self) -> bool:
        """Returns whether the engine should stop and abort its unfinished requests. The engine
        calls it after each step.
        """

    def broken_off(self, parts: Mapping[int, PartialCompletion]) -> None:
        """Receives from the engine the partial completions of requests that it is about to abort,
        by request number (see `take`).
        """


Finished = Callable[[Sequence[int], Sequence[Completion]], None]


class PromptBatch:
    """PromptBatch is a Requests source for a fixed list of prompts: it returns all of them at the
    first `take`, and collects the completions.
    """

    wants_parts = False

    def __init__(self, prompts: Sequence[Prompt], seeds: Sequence[int], finished: Finished):
        pairs = zip(prompts, seeds, strict=True)
        self._requests = [
            Request(prompt.token_ids, seed, rollout, images=prompt.images)
            for rollout, (prompt, seed) in enumerate(pairs)
        ]
        self._told = finished
        self._completions: dict[int, Completion] = {}

    def take(self, room: int) -> Sequence[Request]:
        requests, self._requests = self._requests, []
        return requests

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        self._completions |= zip(numbers, completions, strict=True)
        self._told(numbers, completions)

    def stopped(self) -> bool:
        return False

    def broken_off(self, parts: Mapping[int, PartialCompletion]) -> None: ...

    @property
    def completions(self) -> list[Completion]:
        """Returns the completions in the order of the prompts."""
        return [completion for _, completion in sorted(self._completions.items())]
