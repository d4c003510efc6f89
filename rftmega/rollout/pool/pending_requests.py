"""Tracks the requests of one engine during one generation, across restarts after engine faults:
finished rollouts are not run again.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rftmega.core.errors import EngineFault
from rftmega.core.interfaces import Environment, Reward
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.rollout.engines import Engine
from rftmega.rollout.pool.announcements import Announcements
from rftmega.rollout.pool.partial_rollouts import PartialRollouts
from rftmega.rollout.pool.request_queues import Queue
from rftmega.rollout.pool.reward_workers import RewardWorkers
from rftmega.rollout.pool.running_rollouts import RunningRollouts
from rftmega.rollout.requests import Request
from rftmega.rollout.requests.partial_completion import PartialCompletion
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.watchdog import mark

# called after every engine step: whether to abort unfinished requests
Stop = Callable[[], bool]
TOOLS = 0.1  # seconds between checks for a stop request, while rollouts wait for tools


@dataclass(frozen=True)
class Tasks:
    """Tasks holds the prompts of one generation, one per rollout, with the seed of each, the
    expected length of its completion in tokens, and the sampling parameters of all.
    """

    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    expected_lengths: Sequence[float]
    sampling: Sampling

    def __len__(self) -> int:
        return len(self.prompts)


class PendingRequests:
    """PendingRequests runs the rollouts of one engine: it is the source from which the engine takes
    requests (`rollout.requests.Requests`), and holds the ended rollouts and their scores
    (`judging`). Use it as a context manager.

    The environment runs in the engine's first process, which announces the requests to the engine's
    other processes.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Tasks,
        queue: Queue,
        environment: Environment,
        reward: Reward | None,
        *,
        announced: Announcements | None = None,
        reward_limit: float = math.inf,
        repeats: int = 0,
        most_running: int = 1024,
        partials: PartialRollouts | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Prepares the generation of `tasks`. `queue`: assigns tasks to this engine; `environment`:
        runs the rollouts; `reward`: scores ended rollouts, None for no scores.

        `announced`: the channel between the engine's processes; None if the engine has one process.
        `reward_limit`: see RewardWorkers. `repeats`, `partials`, `loop`: see RunningRollouts.
        `most_running`: see EnginePool.
        """
        self.repeats, self.most_running = repeats, most_running
        self.engine, self.tasks, self.queue, self.environment = engine, tasks, queue, environment
        self.announced, self.partials, self.loop = announced, partials, loop
        self.wants_parts = partials is not None
        self.judging = RewardWorkers(reward, tasks.prompts, limit=reward_limit)
        self._running: RunningRollouts | None = None  # in the engine's first process

    def __enter__(self) -> "PendingRequests":
        self.judging.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.judging.__exit__(kind, error, trace)

    def go_on(self, stop: Stop = lambda: False) -> bool:
        """Runs the unfinished tasks of this engine and further tasks from the queue, until none are
        left or `stop`, called after each engine step, returns True. Returns whether none are left.

        Raises EngineFault if the engine broke down. After a restart of the engine, another call
        runs the tasks that have not ended.
        """
        there = self.judging.answered
        self._left = [place for place in self.queue.given if place not in there]
        self.queue.begin()
        self._stop, self._stopped = stop, False
        # whether the next call of `take` may find new requests; whether every call may
        self._news, self._every = True, False
        self._in_engine = 0  # number of requests
        if self.announced is not None:
            self.announced.begin()
        if self.announced is None or self.announced.speaks:
            self._running = RunningRollouts(
                self.environment,
                self.tasks.prompts,
                self.tasks.seeds,
                self.tasks.expected_lengths,
                row_tokens=self.engine.row_tokens,
                sampling=self.tasks.sampling,
                repeats=self.repeats,
                partials=self.partials,
                loop=self.loop,
            )
        try:
            self.engine.serve(self, sampling=self.tasks.sampling)
            whole = not self._running and not self._left and not self.queue.waiting
            return whole and (not self._stopped or self.queue.empty)
        except EngineFault:
            if self.announced is not None:
                self.announced.broke()
            raise
        finally:
            if self._running is not None:
                self._running.close()
                self._running = None

    def take(self, room: int) -> Sequence[Request]:
        """Starts rollouts while the engine can begin further requests (`room`), and returns the new
        requests of all running rollouts.

        Returns () at once if nothing can have changed: no completion has ended since the last call,
        no rollout waits for a tool, and no task was assigned.
        """
        if not (self._news or self._every or self.queue.waiting):
            return ()
        self._news = False
        if self._running is None:
            asked = self._heard()
        else:
            asked = self._taken(room, self._running)
            self._announce(asked, self._running)
        self._in_engine += len(asked)
        return asked

    def finished(self, numbers: Sequence[int], completions: Sequence[Completion]) -> None:
        """Passes completions to the rollouts that requested them. `numbers`: the numbers of their
        requests, in the order in which `take` returned these.
        """
        mark()
        self._news = True
        self._in_engine -= len(numbers)
        if self._running is not None:
            self._running.resume(numbers, completions)
            self._collect(self._running)

    def stopped(self) -> bool:
        self._stopped = self._stop()
        return self._stopped

    def broken_off(self, parts: Mapping[int, PartialCompletion]) -> None:
        if self._running is not None:
            self._running.broken_off(parts)

    def _taken(self, room: int, running: RunningRollouts) -> list[Request]:
        """Starts rollouts while the engine can begin further requests (`room`). Returns the new
        requests of all `running` rollouts.

        If the engine would be idle while rollouts wait for tools, waits until one of them sends a
        request.
        """
        running.advance()
        self._collect(running)
        asked = running.asked()
        while True:
            while places := self._more(room - len(asked), running):
                running.begin(places)
                self._collect(running)
                asked += running.asked()
            if asked or self._in_engine or not running or preemption.asked():
                return asked
            mark()
            running.wait(TOOLS)
            self._collect(running)
            asked += running.asked()

    def _more(self, room: int, running: RunningRollouts) -> Sequence[int]:
        """Returns the indices of the tasks whose rollouts should start now. `room`: number of
        further requests that the engine can begin; `running`: the rollouts in progress.

        Rollouts that wait for tools occupy no engine slot, but resources elsewhere, so their number
        is limited; rollouts that have not sent a request yet may all send one at once.
        """
        free = max(self.most_running - len(running), 0)
        if self._left:
            places, self._left = self._left[:free], self._left[free:]
            return places
        wanted = min(room, 2 * self.engine.slots - running.silent, free)
        return self.queue.take(wanted) if wanted > 0 else ()

    def _collect(self, running: RunningRollouts) -> None:
        """Passes the rollouts that have ended since the last call to the reward workers."""
        if ended := running.ended():
            self.judging.finished(list(ended), list(ended.values()))

    def _announce(self, asked: Sequence[Request], running: RunningRollouts) -> None:
        self._every = running.waiting
        if self.announced is not None:
            prompts = self.tasks.prompts
            # every process has the prompts
            short = [
                (place, None if ids is prompts[place].token_ids else list(ids), seed, *limits)
                for ids, seed, place, _, _, *limits in asked
            ]
            self.announced.say((short, self.queue.begun, self._every))

    def _heard(self) -> list[Request]:
        assert self.announced is not None
        short, self.queue.begun, self._every = self.announced.receive()
        prompts, expected = self.tasks.prompts, self.tasks.expected_lengths
        return [
            Request(
                prompts[place].token_ids if ids is None else ids,
                seed,
                place,
                expected[place],
                prompts[place].images,
                *limits,
            )
            for place, ids, seed, *limits in short
        ]
