"""Base classes of all callbacks. Trainers call only the methods of Observer, and know no particular
callback.
"""

from collections.abc import Callable
from typing import Any

from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Metrics, Samples


class Observer:
    """Observer is the base class of callbacks: its methods, one per event of a training run, do
    nothing. A callback overrides the methods it needs.
    """

    def on_start(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None: ...

    def on_rollouts(self, trainer: Any, samples: Samples[Ragged]) -> None: ...

    def on_experience(
        self, trainer: Any, samples: Samples[Ragged], experience: Experience[Ragged]
    ) -> None: ...

    def on_step(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_save(self, trainer: Any) -> None: ...

    def on_given_up(self, trainer: Any) -> None: ...

    def on_end(self, trainer: Any) -> None: ...

    def on_failed(self, trainer: Any) -> None: ...


class AtEnd(Observer):
    """AtEnd is a callback that calls `work` once, after the last step, unless the run was stopped
    by a signal before.
    """

    def __init__(self, work: Callable[[], None]):
        self.work = work

    def on_end(self, trainer: Any) -> None:
        if not trainer.stopped:
            self.work()
