"""An ordered queue of prompts; prompts whose completions were not trained on can return to it."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rftmega.core.types import Prompt


class PromptQueue(Iterator[list[Prompt]]):
    """PromptQueue returns prompts in the source's batches, or any number of prompts at a time.

    Each prompt gets its number in the run (`Prompt.task`). Prompts that were put back come first
    and keep their numbers.
    """

    def __init__(self, batches: Iterable[Sequence[Prompt]] = ()):
        self.source(batches)
        self._waiting: deque[Prompt] = deque()  # drawn from the source, or put back
        self._size = 0  # of the source's batches; 0 before the first
        self._drawn = 0  # prompts so far: the number of the next one

    def source(self, batches: Iterable[Sequence[Prompt]]) -> None:
        """Sets the source of further batches, from which prompts are drawn when the queue is empty."""
        self._batches = iter(batches)

    def __next__(self) -> list[Prompt]:
        if not self._size:
            self._draw()
        if not (batch := self.take(self._size)):
            raise StopIteration
        return batch

    def take(self, number: int) -> list[Prompt]:
        """Returns the next `number` prompts, or fewer if the source ends.

        Draws only as many batches as needed.
        """
        while len(self._waiting) < number and self._draw():
            pass
        return [self._waiting.popleft() for _ in range(min(number, len(self._waiting)))]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Puts these prompts at the head of the queue, in this order."""
        self._waiting.extendleft(reversed(prompts))

    def lacks(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns the prompts among `prompts` that are not in the queue."""
        waiting = {prompt.task for prompt in self._waiting}
        return [prompt for prompt in prompts if prompt.task not in waiting]

    def forget(self, tasks: Sequence[int]) -> None:
        """Removes the prompts with the numbers `tasks` from the queue."""
        self._waiting = deque(each for each in self._waiting if each.task not in {*tasks})

    def state(self) -> dict[str, Any]:
        """Returns the queue's state for a resume, without the position of the source, which is
        after the prompts in the queue.

        The batch size is not part of the state: the first batch of the resumed run's source
        determines it.
        """
        return {
            "waiting": [prompt.state() for prompt in self._waiting],
            "drawn": self._drawn,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._waiting = deque(map(Prompt.from_state, state["waiting"]))
        if "drawn" in state:
            self._drawn = state["drawn"]
        else:  # of a checkpoint before format 4
            self._waiting = deque(
                replace(prompt, task=number) for number, prompt in enumerate(self._waiting)
            )
            self._drawn = len(self._waiting)

    def _draw(self) -> bool:
        if (batch := next(self._batches, None)) is None:
            return False
        self._size = self._size or len(batch)
        for prompt in batch:
            self._waiting.append(replace(prompt, task=self._drawn))
            self._drawn += 1
        return True
