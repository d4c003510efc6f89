"""Callbacks that display or write the metrics of every step: a progress bar, metrics.jsonl and
TensorBoard.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rftmega.core.types import Metrics
from rftmega.monitoring.metric_groups import grouped_metrics
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import set_aside, writing
from rftmega.monitoring.observers.step_lines import StepLines

SHOWN = {  # metric -> its name in the progress bar
    "loss": "loss",
    "accuracy": "accuracy",
    "grad_norm": "grad norm",
    "reference_kl": "KL",
    "entropy": "entropy",
    "logprob_gap_max": "gap",
}


class Progress(Observer):
    """Progress is a callback that shows a progress bar with metrics of the last step, and prints a
    line for each evaluation.
    """

    def __init__(
        self, steps: int, accuracy: Mapping[str, str], means: Mapping[str, str] | None = None
    ):
        """Stores the settings. `steps`: number of steps of the run; `accuracy`: name of an
        evaluation set ("" for a single set) -> name of its accuracy metric; `means`: name of an
        evaluation set -> name of its mean-score metric, which is shown if its value differs from
        the accuracy.
        """
        self.steps = steps
        self.accuracy, self.means = accuracy, means or {}

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self._say(metrics, f"after step {trainer.step}" if trainer.step else "before training")
        self.bar = tqdm(total=self.steps, initial=trainer.step, unit="step", dynamic_ncols=True)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.bar.set_postfix_str(status(metrics), refresh=False)
        self.bar.update()
        self._say(metrics, f"after step {trainer.step}")

    def on_end(self, trainer: Any) -> None:
        self.bar.close()

    def on_failed(self, trainer: Any) -> None:
        self.bar.close()

    def _say(self, metrics: Metrics, when: str) -> None:
        found = [
            f"{name} {metrics[metric]:.1%}{self._mean(metrics, name)}".strip()
            for name, metric in self.accuracy.items()
            if metric in metrics
        ]
        if found:
            tqdm.write(f"held-out accuracy {when}: {', '.join(found)}")

    def _mean(self, metrics: Metrics, name: str) -> str:
        """Returns the text that shows the mean score of the evaluation set `name` next to its
        accuracy; "" if it has no mean score or the two are equal.
        """
        mean = metrics.get(self.means.get(name, ""))
        if mean is None or mean == metrics[self.accuracy[name]]:
            return ""
        return f" (mean score {mean:.3g})"


def status(metrics: Metrics) -> str:
    """Returns a one-line summary of a step for the progress bar: its reward, response length,
    tokens per second, loss and similar metrics, as far as `metrics` has them.
    """
    said = []
    if "reward" in metrics:
        said.append(f"reward {metrics['reward']:.3g} ±{metrics.get('spread', 0):.2g}")
        said.append(f"{metrics['response_length']:.0f} tokens per completion")
        seconds = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
        if seconds:
            said.append(f"{metrics['generated_tokens'] / seconds:.3g} tokens/s")
    for metric, name in SHOWN.items():
        if metric in metrics:  # a frozen policy has no loss
            said.append(f"{name} {metrics[metric]:.3g}")
    return ", ".join(said)


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
