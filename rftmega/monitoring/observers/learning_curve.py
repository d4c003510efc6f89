"""Draws the learning curve of a run; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rftmega.monitoring.history import Step
from rftmega.monitoring.observers.evaluation_score import EvaluationScore


def draw(
    history: Sequence[Step], trained: str, scores: Sequence[EvaluationScore], title: str, path: Path
) -> None:
    """Writes a PNG with the curve of the metric `trained` (the reward, or the loss) and the scores of
    the evaluations over the steps. `history`: lines of metrics.jsonl.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    _curve(axes, history, trained, f"{trained} of training", "-")
    for score in scores:
        _curve(axes, history, score.metric, f"evaluation: {score.title}", "o-")
    axes.set_xlabel("step")
    axes.set_title(title)
    if axes.get_lines():
        axes.legend(loc="best")
    figure.savefig(path, dpi=120)


def _curve(axes: Any, history: Sequence[Step], name: str, label: str, style: str) -> None:
    own = [step for step in history if step.get(name) is not None]
    if own:
        axes.plot([step["step"] for step in own], [step[name] for step in own], style, label=label)
