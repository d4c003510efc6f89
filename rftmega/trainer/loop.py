"""The schedule of a training, whatever a step is: how many, what is told to whom, and where it
ends.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rftmega.core.errors import Preempted
from rftmega.core.interfaces import Callback
from rftmega.core.types import COUNT, Metrics
from rftmega.trainer.journal import Journal


class Trainer:
    """`step` counts finished steps, of `last` in all; `stopped` says whether `stop` ended the training, to the
    callbacks of its last step, too; `resumed` whether there was a part of this training before.
    """

    def __init__(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
        journal: Journal | None = None,
    ):
        """`stop` is asked after each step, on every process, and answers alike on all: training
        ends there where it says so. It ends within a step where what the step is made of raises
        Preempted; `journal` then has what was done of it.
        """
        self.callbacks = callbacks
        self.stop, self.stopped = stop, False
        self.journal = journal
        self.step, self.last, self.resumed = 0, 0, False
        self.seconds: Metrics = {}  # of each phase of the present step
        # of the present step's optimizer steps: tokens, operations (types.COUNT)
        self.counts: Metrics = {}

    def train_step(self, batch: Any) -> Metrics:
        """Takes one step, which it counts."""
        raise NotImplementedError

    def fit(self, batches: Iterable[Any], *, steps: int) -> None:
        """Trains until `steps` steps are done, or `stop` says so."""
        self.last = steps
        batches = self.prepare(batches)
        begun: list[Callback] = []
        with self._told_how_it_ends(begun):
            start: Metrics = {}
            for callback in self.callbacks:
                callback.on_start(self, start)
                begun.append(callback)
            self._begin()
            # in this order: draws no batch too many
            for _, batch in zip(range(self.step, self.last), batches, strict=False):
                metrics = self.train_step(batch)
                self.counts = {
                    name.removeprefix(COUNT): metrics.pop(name)
                    for name in list(metrics)
                    if name.startswith(COUNT)
                }
                metrics |= {f"seconds_{name}": seconds for name, seconds in self.seconds.items()}
                self.stopped = self.stop()
                for callback in self.callbacks:
                    callback.on_step(self, metrics)
                self._begin()
                if self.stopped:
                    break

    @contextmanager
    def _told_how_it_ends(self, begun: Sequence[Callback]) -> Iterator[None]:
        """Tell the callbacks in `begun` whether the block ended, was preempted, or failed."""
        try:
            try:
                yield
            except Preempted:
                self.stopped = True
                for callback in begun:  # what is saved can't wait for those that close a connection
                    callback.on_given_up(self)
            for callback in begun:
                callback.on_end(self)
        except BaseException:
            for callback in begun:
                callback.on_failed(self)
            raise

    def prepare(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Returns what `train_step` gets its batches from; called before the first step."""
        return batches

    def _begin(self) -> None:
        if self.journal is not None:
            self.journal.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block's seconds and tells the callbacks."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        for callback in self.callbacks:
            callback.on_phase(self, name, self.seconds[name])

    def state(self) -> dict[str, Any]:
        """Returns what the next step depends on, beside weights, random streams and the order of
        the data; as JSON has it.
        """
        return {"step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on after the step of which this is the `state`."""
        self.step, self.resumed = state["step"], True
