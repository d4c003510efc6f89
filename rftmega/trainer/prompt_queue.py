"""Prompts in their order; those that nothing was learnt from can come again."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rftmega.core.types import Prompt


class PromptQueue(Iterator[list[Prompt]]):
    """Batches of prompts as a source gives them, or any number at a time.

    Each prompt gets its number in the run (`Prompt.task`). What was put back is handed out first,
    and keeps its number.
    """

    def __init__(self, batches: Iterable[Sequence[Prompt]] = ()):
        self.source(batches)
        self._waiting: deque[Prompt] = deque()  # drawn from the source, or put back
        self._size = 0  # of the source's batches; 0 before the first
        self._drawn = 0  # prompts so far: the number of the next task

    def source(self, batches: Iterable[Sequence[Prompt]]) -> None:
        """Goes on with these once nothing waits."""
        self._batches = iter(batches)

    def __next__(self) -> list[Prompt]:
        if not self._size:
            self._draw()
        if not (batch := self.take(self._size)):
            raise StopIteration
        return batch

    def take(self, number: int) -> list[Prompt]:
        """Returns the next `number` prompts, fewer where the source ends.

        Draws no batch that is not needed.
        """
        while len(self._waiting) < number and self._draw():
            pass
        return [self._waiting.popleft() for _ in range(min(number, len(self._waiting)))]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Hands these out next, in this order."""
        self._waiting.extendleft(reversed(prompts))

    def lacks(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Returns those of `prompts` that do not wait here."""
        waiting = {prompt.task for prompt in self._waiting}
        return [prompt for prompt in prompts if prompt.task not in waiting]

    def forget(self, tasks: Sequence[int]) -> None:
        """Takes the prompts of these numbers out."""
        self._waiting = deque(each for each in self._waiting if each.task not in {*tasks})

    def state(self) -> dict[str, Any]:
        """Returns what a resume needs besides the source's own position, which is behind the
        prompts that wait here.

        The size of a batch is the resumed run's own: the first batch that its source gives says it.
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
