"""Runs groups of rollouts on servers in a background thread, while the trainer trains."""

import asyncio
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from rftmega.core.errors import EnvironmentFailed, RewardError
from rftmega.core.interfaces import Environment, Reward, RolloutGroup
from rftmega.core.sampling_seeds import turn_seed
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.rollout.pool.reward_workers import THREADS, Threads
from rftmega.rollout.pool.rollout_attempts import RolloutAttempts
from rftmega.rollout.pool.running_rollouts import refuse_full_context
from rftmega.rollout.requests import Request
from rftmega.rollout.servers.server_group_client import ServerGroupClient
from rftmega.runtime.parallel.watchdog import mark

LOOK_SECONDS = 0.2  # between a waiting caller's checks for a stop request


class Begun(NamedTuple):
    """Begun is a group of rollouts in progress, with the sampling parameters and the reward that it
    began with.
    """

    group: RolloutGroup
    sampling: Sampling
    reward: Reward | None


class StreamModel:
    """StreamModel is the model on servers that the environment calls in one rollout of a
    RolloutRunner.
    """

    def __init__(self, runner: "RolloutRunner", number: int, prompt: Prompt, seed: int, how: Begun):
        self._runner, self._number, self._prompt, self._seed = runner, number, prompt, seed
        self._how, self.sampling, self.row_tokens = how, how.sampling, runner.row_tokens
        self._turns = 0

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        """Generates a completion of the context `token_ids`, with a separate seed per call (turn).
        `max_tokens`: maximum length; None: the run's maximum.
        """
        refuse_full_context(token_ids, self.row_tokens)
        seed = turn_seed(self._seed, self._turns)
        self._turns += 1
        images = self._prompt.images
        request = Request(token_ids, seed, self._number, images=images, most=max_tokens or 0)
        return await self._runner.completion(request, self._how)


class RolloutRunner:
    """RolloutRunner runs groups of rollouts on servers in the event loop of a background thread.
    Any thread may begin groups; ended groups are kept, in the order in which they ended, until
    `take`.
    """

    def __init__(
        self,
        client: ServerGroupClient,
        environment: Environment,
        *,
        row_tokens: int,
        repeats: int,
        most_running: int,
        reward_limit: float = math.inf,
        loop: asyncio.AbstractEventLoop,
    ):
        """Starts the thread. `client`: sends requests to the servers; `environment`: runs the
        rollouts; `most_running`: most concurrent rollouts; `reward_limit`: seconds that a reward
        may take. `row_tokens`, `repeats`, `loop`: see RunningRollouts.
        """
        self.client, self.row_tokens, self.reward_limit = client, row_tokens, reward_limit
        self._attempts = RolloutAttempts(environment, row_tokens=row_tokens, repeats=repeats)
        self._room = asyncio.Semaphore(most_running)
        self._rewards = Threads(THREADS)
        self._numbers = itertools.count()  # numbers of rollouts
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of groups that have not ended
        self._oldest: dict[int, int] = {}  # group -> version of its first token
        self._ended: OrderedDict[int, list[Rollout]] = OrderedDict()
        self._failure: BaseException | None = None
        self._news = threading.Condition()
        self._loop = loop
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._thread.start()

    def begin(self, begun: Begun) -> None:
        self._loop.call_soon_threadsafe(self._begin, begun)

    def wait(self, enough: Callable[[Collection[int]], bool], stop: Callable[[], bool]) -> bool:
        """Waits until `enough`, called with the numbers of the ended groups in the order in which
        they ended, returns True, or `stop` returns True. Returns True in the first case, False in
        the second.

        Raises the exception of a failed rollout or reward.
        """
        with self._news:
            while True:
                if self._failure is not None:
                    raise self._failure
                if enough(self._ended.keys()):
                    return True
                if stop():
                    return False
                self._news.wait(LOOK_SECONDS)

    def take(self, number: int) -> list[Rollout]:
        """Removes group `number`, which must have ended, and returns its rollouts."""
        with self._news:
            return self._ended.pop(number)

    def ended(self) -> dict[int, list[Rollout]]:
        """Returns the rollouts of the groups that have ended and were not taken yet, by group
        number.
        """
        with self._news:
            return dict(self._ended)

    def put(self, number: int, rollouts: list[Rollout]) -> None:
        """Adds group `number` with its rollouts after a resume: it had already ended when the run
        was saved.
        """
        with self._news:
            self._ended[number] = rollouts

    def drop(self, number: int) -> None:
        """Cancels group `number` if it is in progress; discards its rollouts if it has ended."""
        with self._news:
            self._ended.pop(number, None)
        self._loop.call_soon_threadsafe(self._drop, number)

    def before(self, version: int) -> list[int]:
        """Returns the numbers of the groups, ended or in progress, that may have tokens from
        weights older than version `version`.
        """
        with self._news:
            ended = list(self._ended.items())
        found = [number for number, first in list(self._oldest.items()) if first < version]
        for number, rollouts in ended:
            versions = [own for rollout in rollouts for own in rollout.versions]
            if versions and min(versions) < version:
                found.append(number)
        return found

    def close(self) -> None:
        """Cancels unfinished rollouts and ends the thread. Afterwards another thread may run the
        event loop.
        """
        ending = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._rewards.close()

    async def completion(self, request: Request, how: Begun) -> Completion:
        def begun(version: int) -> None:
            self._oldest.setdefault(how.group.number, version)

        found = await self.client.complete(request, how.sampling, begun)
        mark()
        return found

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, begun: Begun) -> None:
        number = begun.group.number
        self._tasks[number] = self._loop.create_task(self._run(begun))

    def _drop(self, number: int) -> None:
        if task := self._tasks.pop(number, None):
            task.cancel()
        self._oldest.pop(number, None)

    async def _run(self, begun: Begun) -> None:
        group = begun.group
        own = [self._loop.create_task(self._rollout(begun, seed)) for seed in group.seeds]
        try:
            rollouts = await asyncio.gather(*own)
        except BaseException as error:
            for task in own:
                task.cancel()
            if isinstance(error, asyncio.CancelledError):
                raise
            with self._news:
                self._failure = self._failure or error
                self._news.notify_all()
            return
        with self._news:
            self._tasks.pop(group.number, None)
            self._oldest.pop(group.number, None)
            self._ended[group.number] = rollouts
            self._news.notify_all()

    async def _rollout(self, begun: Begun, seed: int) -> Rollout:
        prompt = begun.group.prompt
        async with self._room:
            number = next(self._numbers)

            def new_model() -> StreamModel:
                return StreamModel(self, number, prompt, seed, begun)

            try:
                rollout = await self._attempts.run(prompt, new_model)
            except (RewardError, asyncio.CancelledError):
                raise
            except (Exception, SystemExit) as error:
                raise EnvironmentFailed(self._attempts.failure(error, prompt)) from error
            finally:
                self.client.forget(number)
        if begun.reward is None:
            return rollout
        if rollout.lost:
            return replace(rollout, scores={})
        return await self._scored(begun.reward, prompt, rollout)

    async def _scored(self, reward: Reward, prompt: Prompt, rollout: Rollout) -> Rollout:
        scores = self._rewards.submit(lambda: reward([prompt], [rollout]))
        try:
            async with asyncio.timeout(
                None if math.isinf(self.reward_limit) else self.reward_limit
            ):
                (own,) = await asyncio.wrap_future(scores)
        except TimeoutError as error:
            raise RewardError(
                f"The reward gave no scores within reward.timeout={self.reward_limit:g} s for a completion of prompt "
                f"{prompt.index}. Look at what it waits for, or raise the limit."
            ) from error
        mark()
        return replace(rollout, scores=own)

    async def _close(self) -> None:
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in others:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in others if task), return_exceptions=True)
        await self.client.close()
