"""A file with the order in which an asynchronous run trains on groups (the rollouts of a prompt),
so that the run can be replayed.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.step_lines import StepLines


class TrainedOrder(StepLines):
    """TrainedOrder is a callback that writes a line per step: the numbers of the groups that the
    step trained on and dropped, and the policy versions that sampled their tokens, with the fields
    of `trainer.trained_order.TrainedGroups`.
    """

    what = "learnt groups"

    def __init__(
        self, path: str | Path, *, prompts_per_step: int, max_staleness: int, warn: bool = False
    ):
        """Stores the settings. `path`: the file; `prompts_per_step` and `max_staleness`: these
        options of the run, which are written into each line, since a run with other values can't
        replay the order; `warn`: see StepLines.
        """
        super().__init__(path, warn=warn)
        self.sizes = {"prompts_per_step": prompts_per_step, "max_staleness": max_staleness}

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.write({"step": trainer.step, **self.sizes, **asdict(trainer.schedule.trained)})
