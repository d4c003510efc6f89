"""When a run is saved, and what of it the left column knows."""

import time
from collections.abc import Mapping
from typing import Any

from rftmega.interfaces import Checkpoints, Resumable
from rftmega.trainer.callbacks import Observer
from rftmega.types import Metrics


class Checkpointing(Observer):
    """Saves after every `every`-th step, after step `last`, and where the run is stopped.

    The last of the callbacks: what the others wrote of a step must be there when the step is saved.
    """

    def __init__(self, checkpoints: Checkpoints, parts: Mapping[str, Resumable], *, every: int, last: int):
        """`parts` are saved under their names; see `resume`."""
        self.checkpoints, self.parts = checkpoints, parts
        self.every, self.last = every, last

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        if trainer.stopped or trainer.step == self.last or trainer.step % self.every == 0:
            begin = time.perf_counter()
            self.checkpoints.save({name: part.state() for name, part in self.parts.items()}, step=trainer.step)
            for callback in trainer.callbacks:
                callback.on_phase(trainer, "checkpoint", time.perf_counter() - begin)

    def on_end(self, trainer: Any) -> None:
        self.checkpoints.wait()


def resume(parts: Mapping[str, Resumable], state: Mapping[str, Any]) -> None:
    """Takes back what `Checkpointing` saved of the same parts."""
    for name, part in parts.items():
        part.load_state(state[name])
