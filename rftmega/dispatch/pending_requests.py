"""Tracks what one engine is asked in one rollout, over its faults: answers that are there are not
asked for again.
"""

import math
from collections.abc import Callable, Sequence
from types import TracebackType

from rftmega.dispatch.request_queues import Queue
from rftmega.dispatch.reward_workers import RewardWorkers
from rftmega.errors import EngineFault
from rftmega.interfaces import Reward
from rftmega.rollout import Engine
from rftmega.rollout.base import Stop
from rftmega.types import Completion, Prompt

# what the first process of an engine says, of what each of them would
Agree = Callable[[list[int]], list[int]]


class PendingRequests:
    """PendingRequests holds the requests of this process's engine, and its scored answers so far
    (`judging`): a context.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None,
        queue: Queue,
        *,
        agree: Agree = lambda places: places,
        reward_limit: float = math.inf,
    ):
        """Takes all requests of the rollout, of which the `queue` says whose they are.

        `reward_limit`: see RewardWorkers.
        """
        self.engine, self.prompts, self.seeds, self.temperature = (
            engine,
            prompts,
            seeds,
            temperature,
        )
        self.queue, self.agree = queue, agree
        self.judging = RewardWorkers(reward, prompts, limit=reward_limit)

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
        """Asks for what is given and not answered, and takes more, until there is none or `stop`
        says so: whether there is none.

        Raises EngineFault where the engine broke down; called again after its restart, it goes on
        from there.
        """
        answered = self.judging.answered
        places = self.agree([place for place in self.queue.given if place not in answered])
        self.queue.begin()
        try:
            while places or (places := self.queue.take(self.engine.slots)):
                if not self._ask(places, stop):
                    return False
                places = []
        except EngineFault:
            self.queue.broke()
            raise
        return True

    def _ask(self, places: Sequence[int], stop: Stop) -> bool:
        """Returns the answers at the places, and whatever else the engine has room for; whether it
        all came.
        """
        begun, stopped = list(places), False

        def finished(numbers: Sequence[int], completions: Sequence[Completion]) -> None:
            self.judging.finished([begun[number] for number in numbers], completions)

        def more(room: int) -> list[tuple[Prompt, int]]:
            further = self.queue.take(room)
            begun.extend(further)
            return [(self.prompts[place], self.seeds[place]) for place in further]

        def asked() -> bool:
            nonlocal stopped
            stopped = stop()
            return stopped

        prompts, seeds = (
            [self.prompts[place] for place in places],
            [self.seeds[place] for place in places],
        )
        found = self.engine.generate_until(
            prompts,
            seeds=seeds,
            temperature=self.temperature,
            finished=finished,
            stop=asked,
            more=more,
        )
        return None not in found and (not stopped or self.queue.empty)
