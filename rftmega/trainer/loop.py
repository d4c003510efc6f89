"""The training loop that all trainers share: step counting, callbacks, stopping."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rftmega.core.errors import Preempted
from rftmega.core.interfaces import Callback
from rftmega.core.types import COUNT, Metrics
from rftmega.trainer.journal import Journal


class Trainer:
    """Base class of trainers.

    `step`: number of finished steps; `last`: number of steps at which training ends; `stopped`:
    whether `stop` ended the training, already set when callbacks of the last step are called;
    `resumed`: whether a checkpoint was loaded.
    """

    def __init__(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
        journal: Journal | None = None,
    ):
        """`stop` is called after each step, on every process, and must return the same value on all
        processes; training ends when it returns True. Training ends within a step if a component
        raises Preempted; `journal` then holds the results of the unfinished step.
        """
        self.callbacks = callbacks
        self.stop, self.stopped = stop, False
        self.journal = journal
        self.step, self.last, self.resumed = 0, 0, False
        self.seconds: Metrics = {}  # of each phase of the current step
        # of the current step's optimizer steps: tokens, FLOPs (types.COUNT)
        self.counts: Metrics = {}

    def train_step(self, batch: Any) -> Metrics:
        """Takes one training step on `batch`, increments `step` and returns the step's metrics."""
        raise NotImplementedError

    def fit(self, batches: Iterable[Any], *, steps: int) -> None:
        """Trains on `batches` until `steps` steps are done, counting those before a resume, or
        `stop` returns True.
        """
        self.last = steps
        batches = self.prepare(batches)
        begun: list[Callback] = []
        with self._told_how_it_ends(begun):
            start: Metrics = {}
            for callback in self.callbacks:
                callback.on_start(self, start)
                begun.append(callback)
            self._begin()
            # `range` first: draws no surplus batch
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
        """Notifies the callbacks in `begun` whether training in the block ended, was preempted, or
        failed.
        """
        try:
            try:
                yield
            except Preempted:
                self.stopped = True
                for callback in begun:  # save before callbacks close connections
                    callback.on_given_up(self)
            for callback in begun:
                callback.on_end(self)
        except BaseException:
            for callback in begun:
                callback.on_failed(self)
            raise

    def prepare(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Returns the iterable of batches for `train_step`; called before the first step."""
        return batches

    def _begin(self) -> None:
        if self.journal is not None:
            self.journal.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the duration of the block and passes it to the callbacks as that of phase
        `name`.
        """
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        for callback in self.callbacks:
            callback.on_phase(self, name, self.seconds[name])

    def state(self) -> dict[str, Any]:
        """Returns the trainer's state for a resume as JSON; weights, random states and the data
        order are not part of it.
        """
        return {"step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the trainer from `state`, a value that the method `state()` returned, so that it
        continues after the saved step.
        """
        self.step, self.resumed = state["step"], True
