"""An environment of two turns with a tool between them, and what its rollouts must be."""

import asyncio
from collections.abc import Callable, Sequence

from rftmega.core.interfaces import Model
from rftmega.core.sampling_seeds import turn_seed
from rftmega.core.types import Completion, Prompt, Trajectory


class TwoTurns:
    """Answers, a tool's reply of two tokens, and another answer; the tool takes `seconds`."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    async def run(self, task: Prompt, model: Model) -> Sequence[Trajectory]:
        first = await model.generate(task.token_ids)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        reply = (40, 41)
        second = await model.generate((*task.token_ids, *first.token_ids, *reply))
        return [Trajectory.of(task.token_ids, first, reply, second)]


def expected(
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    completion: Callable[[Sequence[int], int], Completion],
) -> list[Trajectory]:
    """What TwoTurns gives with a model that is asked one request at a time."""
    found = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        first = completion(prompt.token_ids, seed)
        context = (*prompt.token_ids, *first.token_ids, 40, 41)
        second = completion(context, turn_seed(seed, 1))
        found.append(Trajectory.of(prompt.token_ids, first, (40, 41), second))
    return found
