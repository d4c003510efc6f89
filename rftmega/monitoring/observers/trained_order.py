"""TrainedOrder records the order in which an asynchronous run learns, for another run to take it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.step_lines import StepLines


class TrainedOrder(StepLines):
    """Writes a line a step: the groups that were taken and dropped, and their versions, as
    `trainer.trained_order.TrainedGroups` has them.
    """

    what = "learnt groups"

    def __init__(
        self, path: str | Path, *, prompts_per_step: int, max_staleness: int, warn: bool = False
    ):
        """The sizes go into each line: a run with others can't take this order."""
        super().__init__(path, warn=warn)
        self.sizes = {"prompts_per_step": prompts_per_step, "max_staleness": max_staleness}

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.write({"step": trainer.step, **self.sizes, **asdict(trainer.schedule.trained)})
