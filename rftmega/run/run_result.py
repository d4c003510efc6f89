"""RunResult is the outcome of a training run: metrics, a table and plots."""

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftmega.monitoring.history import (
    Change,
    Step,
    changes,
    component_of,
    graded_accuracies,
    read_history,
)


@dataclass(frozen=True, slots=True)
class RunResult:
    """RunResult is the outcome of a training run. A notebook shows it as a table."""

    metrics: dict[str, float | None]  # of the last step, as metrics.jsonl has them
    output: Path  # the run's folder, trainer.output
    stopped: bool  # by a signal, before the last step; the same call resumes there
    exit_code: int  # of rftmega train: 0, or faults.requeue_code if it was stopped

    @property
    def history(self) -> list[Step]:
        """Returns the metrics of all steps; the first is the evaluation before training."""
        return read_history(self.output / "metrics.jsonl")

    def table(self, *names: str) -> Any:
        """Returns a pandas.DataFrame with a row per step and a column per metric, for the metrics in
        `names` or, without names, for all.

        Raises ImportError without pandas.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("A table needs pandas: pip install pandas.") from error
        frame = pandas.DataFrame(self.history).set_index("step")
        return frame[list(names)] if names else frame.drop(columns="time")

    def plot(self, *names: str) -> Any:
        """Returns a matplotlib.figure.Figure with a curve over the steps for each metric in `names`
        or, without names, for the metrics of the run's summary.

        Raises ImportError without matplotlib, KeyError for a metric that no step has.
        """
        try:
            from rftmega.run.curves import Curves
        except ImportError as error:
            raise ImportError("A plot needs matplotlib: pip install matplotlib.") from error
        history = self.history
        return Curves(history, names or tuple(self._changes()))

    def _changes(self) -> dict[str, Change]:
        """Returns the first and last value of the main metrics, without accuracies of graded
        rewards.
        """
        history = self.history
        left_out = graded_accuracies(history, component_of(self.output))
        return {name: each for name, each in changes(history).items() if name not in left_out}

    def _repr_html_(self) -> str:
        """Returns an HTML table of first and last values, for a notebook."""
        ended = "stopped, and goes on where it is started again" if self.stopped else "finished"
        head = f"<p>{ended}; <code>{html.escape(str(self.output))}</code></p>"
        rows = [
            f"<tr><th>{html.escape(name)}</th><td>{change.first:.4g}</td><td>{change.last:.4g}</td></tr>"
            for name, change in self._changes().items()
        ]
        titles = "<tr><th>metric</th><th>first</th><th>last</th></tr>"
        return f"{head}<table>{titles}{''.join(rows)}</table>"
