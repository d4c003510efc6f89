"""Checkpointing: a callback that saves checkpoints of a run, and functions that resume the run from
them.
"""

import time
from collections.abc import Mapping
from typing import Any

from rftmega.config import CheckpointConfig
from rftmega.core.errors import CheckpointError
from rftmega.core.interfaces import Checkpoints, Resumable
from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer

WITHIN = "within"  # key of the journal of an unfinished step


class Checkpointing(Observer):
    """Checkpointing is a callback that saves a checkpoint after every `every`-th step, after step
    `last`, and when the run is stopped.

    If the run is stopped within a step, the checkpoint has the state at the beginning of the step
    and the trainer's journal, the record of the work done in the step, from which a resumed run
    continues within it. Checkpointing must come after all callbacks that write: their output of a
    step must be complete when the step is saved.
    """

    def __init__(
        self, checkpoints: Checkpoints, parts: Mapping[str, Resumable], *, every: int, last: int
    ):
        """Stores the settings. `checkpoints`: writes and reads checkpoints; `parts`: the components
        whose state is saved, by the names under which `restore` finds them; `every` and `last`: the
        steps after which a checkpoint is saved.
        """
        self.checkpoints, self.parts = checkpoints, parts
        self.every, self.last = every, last
        self._state: dict[str, Any] = {}  # after `_step` steps, the start of the current step
        self._step = self._saved = 0

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self._remember(trainer)
        # this step needs no checkpoint: the resumed run saved it, or it is step 0
        self._saved = trainer.step

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self._remember(trainer)
        if trainer.stopped or trainer.step == self.last or trainer.step % self.every == 0:
            begin = time.perf_counter()
            self._save(trainer, self._state)
            if trainer.stopped:
                self.checkpoints.wait()
            for callback in trainer.callbacks:
                callback.on_phase(trainer, "checkpoint", time.perf_counter() - begin)

    def on_given_up(self, trainer: Any) -> None:
        if self._saved != self._step or trainer.journal:
            self._save(
                trainer,
                self._state | ({WITHIN: trainer.journal.state()} if trainer.journal else {}),
            )
            self.checkpoints.wait()

    def on_end(self, trainer: Any) -> None:
        self.checkpoints.wait()

    def on_failed(self, trainer: Any) -> None:
        self.checkpoints.leave()

    def _save(self, trainer: Any, state: dict[str, Any]) -> None:
        for callback in trainer.callbacks:
            callback.on_save(trainer)
        self.checkpoints.save(state, step=self._step)
        self._saved = self._step

    def _remember(self, trainer: Any) -> None:
        self._state, self._step = (
            {name: part.state() for name, part in self.parts.items()},
            trainer.step,
        )


def resume(
    trainer: Any, checkpoints: Checkpoints, parts: Mapping[str, Resumable], chosen: CheckpointConfig
) -> None:
    """Loads the checkpoint that the option checkpoint.resume selects, if there is one: first the
    models, then the state of `parts`, components by name (see `restore`). `chosen`: the options
    checkpoint.*.

    Every process must call this function.
    """
    if not chosen.every and chosen.resume in ("auto", "none"):
        return
    state = checkpoints.resume()
    if state is not None:
        restore(trainer, parts, state)


def restore(trainer: Any, parts: Mapping[str, Resumable], state: Mapping[str, Any]) -> None:
    """Restores the components `parts` (by name) from `state`, a checkpoint of `Checkpointing`, and,
    if the run was stopped within a step, the trainer's journal, the record of the work done in that
    step.

    Raises CheckpointError if the run was stopped within a step and `trainer` has no journal.
    """
    if state.get(WITHIN) and trainer.journal is None:
        raise CheckpointError(
            "The run was stopped within a step, and one that saves nothing can't go on within it: set checkpoint.every."
        )
    for name, part in parts.items():
        part.load_state(state[name])
    if trainer.journal is not None:
        trainer.journal.load_state(state.get(WITHIN, []))
