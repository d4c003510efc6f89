"""Request asks an engine for one completion; Requests tells it what to answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rftmega.core.media_positions import Placed
from rftmega.core.types import Completion, Prompt
from rftmega.rollout.requests.partial_completion import PartialCompletion


class Request(NamedTuple):
    """Request asks an engine for one completion."""

    token_ids: Sequence[int]
    seed: int
    rollout: int = 0  # requests of one rollout stay on one server
    expected: float = 0.0  # tokens of the answer; several servers share the work by it
    # of the tokens, which have a placeholder for each feature
    images: tuple[Placed, ...] = ()
    most: int = 0  # tokens of the answer; 0: as many as the engine gives
    answered: int = 0  # of `token_ids` so many at the end are the answer's first

    def limit(self, longest: int) -> int:
        """Returns how many more tokens the answer may have, of an engine that gives at most `longest`."""
        return (min(self.most, longest) if self.most else longest) - self.answered


class Requests(Protocol):
    """Requests tells an engine what to answer, also while it answers others.

    Every process of an engine asks after the same steps.
    """

    wants_parts: bool  # whether `broken_off` is to be told

    def take(self, room: int) -> Sequence[Request]:
        """Returns further requests for an engine with room for `room` more, at times some more than
        that; none where there is nothing now.

        Requests are numbered in this order. An engine that has answered all and gets none is done.
        """

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Receives completions as soon as they are there, each once."""

    def stopped(self) -> bool:
        """Says, after an engine's step, whether it is to leave what is not finished."""

    def broken_off(self, parts: Mapping[int, PartialCompletion]) -> None:
        """Receives what there is of the answers that were left, by number."""


Finished = Callable[[Sequence[int], Sequence[Completion]], None]


class PromptBatch:
    """PromptBatch is Requests that are all there at once."""

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
