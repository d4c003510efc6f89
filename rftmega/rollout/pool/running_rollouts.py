"""Runs an environment's coroutines (rollouts) in the same thread as the engine that generates their
completions.
"""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rftmega.core.errors import ContextTooLong, EnvironmentFailed
from rftmega.core.interfaces import Environment
from rftmega.core.sampling_seeds import continued_seed, turn_seed
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.rollout.pool.partial_rollouts import PartialRollouts, digest
from rftmega.rollout.pool.rollout_attempts import RolloutAttempts
from rftmega.rollout.requests import Request
from rftmega.rollout.requests.partial_completion import NOTHING, PartialCompletion

PASSES = 8  # of the event loop between two engine steps, while rollouts wait for tools


def refuse_full_context(token_ids: Sequence[int], row_tokens: int) -> None:
    """Checks a context before it is sent to an engine. Raises ContextTooLong if its `token_ids`
    leave no room for a completion within `row_tokens`, the limit on both together; ValueError if it
    is empty.
    """
    if not len(token_ids):
        raise ValueError("the model was asked with no token")
    if len(token_ids) >= row_tokens:
        raise ContextTooLong(
            f"a context of {len(token_ids)} tokens leaves no room for a completion: rollout.max_prompt_tokens + "
            f"rollout.max_response_tokens is {row_tokens}. End the rollout before, or raise them"
        )


class RolloutModel:
    """RolloutModel is the model that the environment calls in one rollout of RunningRollouts; this
    process's engine generates its completions.
    """

    def __init__(self, running: "RunningRollouts", place: int, seed: int):
        self._running, self._place, self._seed = running, place, seed
        self._turns = 0
        self.row_tokens, self.sampling = running.row_tokens, running.sampling

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        """Generates a completion of the context `token_ids`, with a separate seed per call (turn).
        `max_tokens`: maximum length; None: the run's maximum.
        """
        turn, self._turns = self._turns, self._turns + 1
        seed = turn_seed(self._seed, turn)
        return await self._running.completion(self._place, token_ids, turn, seed, max_tokens or 0)


class Outstanding(NamedTuple):
    """Outstanding is an engine request without a completion yet, with the future that its rollout
    awaits.
    """

    future: "asyncio.Future[Completion]"
    place: int
    turn: int
    context: bytes  # digest
    before: PartialCompletion  # the earlier part of the completion


class RunningRollouts:
    """RunningRollouts runs the environment's coroutine of each rollout, in the engine's thread. The
    coroutines advance only within calls of its methods, between engine steps, and otherwise wait
    for completions or tools.
    """

    def __init__(
        self,
        environment: Environment,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        expected_lengths: Sequence[float],
        *,
        row_tokens: int = sys.maxsize,
        sampling: Sampling = Sampling(),  # noqa: B008  it is immutable
        repeats: int = 0,
        partials: PartialRollouts | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Prepares rollouts of `prompts`, which `begin` starts. `seeds`: seed of each rollout's
        first turn; `expected_lengths`: expected number of tokens of each rollout's completion.
        `row_tokens`: the engine's limit on prompt and completion together. `sampling`: the sampling
        parameters. `repeats`: how often a rollout is run again after an InfrastructureFault, before
        the rollout is lost. `partials`: partial completions to continue and to record; None: no
        completions are continued or recorded. `loop`: an event loop for the whole run, since
        objects of the environment may be bound to it; None: a new loop.
        """
        self.row_tokens, self.sampling = row_tokens, sampling
        self.prompts, self.seeds = prompts, seeds
        self._attempts = RolloutAttempts(environment, row_tokens=row_tokens, repeats=repeats)
        self.expected_lengths, self.partials = expected_lengths, partials
        self._loop = loop or asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # unfinished rollouts
        self._silent: set[int] = set()  # those of them without any request yet
        self._asked: list[Request] = []  # not yet taken
        # unfinished requests: not yet taken, and later by number
        self._new: list[Outstanding] = []
        self._completions: dict[int, Outstanding] = {}
        self._numbers = 0
        self._ended: dict[int, Rollout] = {}
        self._failed: tuple[int, BaseException] | None = None
        self._closing = False
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Returns the number of rollouts that have begun and not ended."""
        return len(self._tasks)

    @property
    def silent(self) -> int:
        """Returns the number of rollouts that have begun and have not sent a request to the engine
        yet.
        """
        return len(self._silent)

    @property
    def waiting(self) -> bool:
        """Returns whether a rollout waits for something other than the engine, e.g. a tool."""
        return len(self._tasks) > len(self._completions) + len(self._new)

    def begin(self, places: Sequence[int]) -> None:
        """Starts the rollouts of the prompts at the indices `places`."""
        self._silent |= set(places)
        for place in places:
            self._tasks[place] = self._loop.create_task(self._run(place))
        self.advance()

    def asked(self) -> list[Request]:
        """Returns the requests that rollouts have sent since the last call. Over all calls,
        requests are numbered from 0 in this order.
        """
        self._completions |= enumerate(self._new, start=self._numbers)
        self._numbers += len(self._new)
        asked, self._asked, self._new = self._asked, [], []
        return asked

    def resume(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Passes completions to the rollouts that requested them; these rollouts then continue.
        `numbers`: the numbers of their requests, see `asked`.
        """
        for number, completion in zip(numbers, completions, strict=True):
            asked = self._completions.pop(number)
            if self.partials is not None:
                more = PartialCompletion.of(completion)
                completion = self._noted(asked, self.partials, more).whole()
            if not asked.future.done():  # an environment may have given up waiting
                asked.future.set_result(completion)
        self.advance()

    def broken_off(self, parts: Mapping[int, PartialCompletion]) -> None:
        """Records the partial completions of requests that the engine has aborted. `parts`: request
        number (see `asked`) -> tokens so far.
        """
        assert self.partials is not None
        for number, part in parts.items():
            self._noted(self._completions[number], self.partials, part)

    def wait(self, seconds: float) -> None:
        """Waits until a rollout sends a request or ends, for at most `seconds`."""
        self._news.clear()
        self.advance()
        if not self._new and not self._ended:
            self._loop.run_until_complete(self._news_within(seconds))
            self.advance()

    def advance(self) -> None:
        """Runs the coroutines of all rollouts as far as they get without further completions, i.e.
        until no more requests are sent and no more rollouts end.

        Raises EnvironmentFailed if an environment raised an exception.
        """
        before = -1
        while before != (before := len(self._new) + len(self._ended)):
            # a tool's reply passes through several callbacks
            for _ in range(PASSES if self.waiting else 1):
                self._loop.call_soon(self._loop.stop)
                self._loop.run_forever()
        if self._failed is not None:
            place, error = self._failed
            raise EnvironmentFailed(self._attempts.failure(error, self.prompts[place])) from error

    def ended(self) -> dict[int, Rollout]:
        """Returns the rollouts that have ended since the last call, by the index of the task."""
        ended, self._ended = self._ended, {}
        return ended

    def close(self) -> None:
        """Cancels unfinished rollouts, and all other asyncio tasks that an environment started."""
        self._closing = True
        self._loop.run_until_complete(self._broken_off(asyncio.all_tasks(self._loop)))

    async def completion(
        self, place: int, token_ids: Sequence[int], turn: int, seed: int, most: int = 0
    ) -> Completion:
        """Requests a completion of `token_ids` with at most `most` tokens (0: the engine's limit)
        and awaits it. If a partial completion of the same turn is known, requests only the missing
        tokens. `place`: index of the rollout's prompt; `turn`: number of the turn, from 0; `seed`:
        the turn's seed.

        Raises ContextTooLong if the context leaves no room for a completion.
        """
        refuse_full_context(token_ids, self.row_tokens)
        context, before = b"", NOTHING
        if self.partials is not None:
            context = digest(token_ids)
            before = self.partials.known(place, turn, context)
            if before.reason != "abort":
                self._silent.discard(place)
                return before.whole()
        future = self._loop.create_future()
        if token_ids is not self.prompts[place].token_ids:  # e.g. a NumPy array
            token_ids = tuple(map(int, token_ids))
        if answered := len(before.token_ids):
            token_ids = (*token_ids, *before.token_ids)
            seed = continued_seed(seed, answered)
        expected, images = self.expected_lengths[place], self.prompts[place].images
        self._asked.append(Request(token_ids, seed, place, expected, images, most, answered))
        self._new.append(Outstanding(future, place, turn, context, before))
        self._silent.discard(place)
        self._news.set()
        return await future

    @staticmethod
    def _noted(
        asked: Outstanding, partials: PartialRollouts, more: PartialCompletion
    ) -> PartialCompletion:
        """Appends `more`, the tokens that the engine has generated for the request `asked`, to the
        earlier part of its completion. Records the result in `partials` and returns it.
        """
        completion = asked.before.with_more(more)
        partials.note(asked.place, asked.turn, asked.context, completion)
        return completion

    async def _run(self, place: int) -> None:
        try:
            self._ended[place] = await self._attempts.run(
                self.prompts[place], lambda: RolloutModel(self, place, self.seeds[place])
            )
        except BaseException as error:  # any error, or the engine would wait forever
            if self._closing or isinstance(error, KeyboardInterrupt):
                raise
            self._failed = place, error
        self._tasks.pop(place)
        self._silent.discard(place)
        self._news.set()

    async def _broken_off(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _news_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
