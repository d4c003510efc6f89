"""Requests for completions, and the interface through which an engine gets them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rftmega.core.media_positions import Placed
from rftmega.core.types import Completion, Prompt
from rftmega.rollout.requests.partial_completion import PartialCompletion


class Request(NamedTuple):
    """Request is a request to an engine for one completion."""

    token_ids: Sequence[int]
    seed: int
    rollout: int = 0  # requests of one rollout stay on one server
    expected: float = 0.0  # tokens of the completion; used to balance servers
    # in the tokens, which have a placeholder for each feature
    images: tuple[Placed, ...] = ()
    most: int = 0  # maximum tokens of the completion; 0: the engine's limit
    answered: int = 0  # number of tokens at the end of `token_ids` that begin the completion

    def limit(self, longest: int) -> int:
        """Returns how many more tokens the completion may have, on an engine that generates at most
        `longest`.
        """
        return (min(self.most, longest) if self.most else longest) - self.answered


class Requests(Protocol):
    """Requests is an engine's source of requests, also while it serves others.

    Every process of an engine calls it after the same steps.
    """

    wants_parts: bool  # whether `broken_off` should be called

    def take(self, room: int) -> Sequence[Request]:
        """Returns further requests for an engine with room for `room` more, sometimes a few more;
        none if there are none now.

        Requests are numbered in this order. An engine without unfinished requests that gets none is
        done.
        """

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Receives completions as soon as they are finished, each once."""

    def stopped(self) -> bool:
        """Returns, after an engine step, whether the engine should abort unfinished requests."""

    def broken_off(self, parts: Mapping[int, PartialCompletion]) -> None:
        """Receives the partial completions of aborted requests, by number."""


Finished = Callable[[Sequence[int], Sequence[Completion]], None]


class PromptBatch:
    """PromptBatch is a Requests whose requests are all available at once."""

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
