"""Callbacks that write the metrics of every step: metrics.jsonl and TensorBoard."""

import math
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rftmega.core.types import Metrics
from rftmega.monitoring.metric_groups import grouped_metrics
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import set_aside, writing
from rftmega.monitoring.observers.step_lines import StepLines


class JSONLines(StepLines):
    """JSONLines is a callback that writes the metrics of every step to a file (metrics.jsonl), one
    JSON object per line.
    """

    what = "metrics"

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        super().on_start(trainer, metrics)
        if not trainer.resumed:
            self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.write({"step": trainer.step, "time": time.time(), **_finite(metrics)})


def _finite(metrics: Metrics) -> dict[str, float | None]:
    """Returns the metrics with None instead of values that are not finite, since JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class TensorBoard(Observer):
    """TensorBoard is a callback that writes the metrics of every step as TensorBoard scalars, under
    the names of metric_groups.
    """

    def __init__(self, folder: str | Path, *, warn: bool = False):
        self.folder, self.warn = Path(folder), warn

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        with writing(self.folder):
            if not trainer.resumed:
                set_aside(self.folder)
            self.writer = SummaryWriter(
                str(self.folder), purge_step=trainer.step + 1 if trainer.resumed else None
            )
        if not trainer.resumed:
            self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        with writing(self.folder, warn=self.warn):
            for name, value in grouped_metrics(metrics).items():
                self.writer.add_scalar(name, value, trainer.step)

    def on_save(self, trainer: Any) -> None:
        with writing(self.folder, warn=self.warn):
            self.writer.flush()

    def on_end(self, trainer: Any) -> None:
        with writing(self.folder, warn=self.warn):
            self.writer.close()

    def on_failed(self, trainer: Any) -> None:
        with writing(self.folder, warn=self.warn):
            self.writer.close()
