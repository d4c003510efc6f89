"""What one engine is asked in one rollout, over its faults: answers that are there are not asked for again."""

import math
from collections.abc import Sequence
from types import TracebackType

from rftmega.interfaces import Reward
from rftmega.rollout import Engine
from rftmega.rollout.base import Stop
from rftmega.strategy.judging import Judging
from rftmega.types import Completion, Prompt


class Asking:
    """The requests of this process's engine, and its scored answers so far (`judging`); use it as a context."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None,
        *,
        reward_limit: float = math.inf,
    ):
        """`reward_limit`: see Judging."""
        self.engine, self.prompts, self.seeds, self.temperature = engine, prompts, seeds, temperature
        self.judging = Judging(reward, prompts, limit=reward_limit)

    def __enter__(self) -> "Asking":
        self.judging.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.judging.__exit__(kind, error, trace)

    def go_on(self, stop: Stop = lambda: False) -> bool:
        """Asks for what is not answered yet, until it is or `stop` says so: whether it is.

        Raises EngineFault where the engine broke down; called again after its restart, it goes on from there.
        """
        answered = self.judging.answered
        left = [place for place in range(len(self.prompts)) if place not in answered]

        def finished(places: Sequence[int], completions: Sequence[Completion]) -> None:
            self.judging.finished([left[place] for place in places], completions)

        prompts, seeds = [self.prompts[place] for place in left], [self.seeds[place] for place in left]
        found = self.engine.generate_until(prompts, seeds=seeds, temperature=self.temperature, finished=finished, stop=stop)
        return None not in found
