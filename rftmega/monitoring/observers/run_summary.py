"""Reports a run at its end: ten lines on the console, summary.json and learning_curve.png."""

import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.monitoring.history import Step, changes, read_history
from rftmega.monitoring.observers.evaluation_score import EvaluationScore, evaluation_scores
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import writing
from rftmega.runtime.parallel.environment import whole_number

SUMMARY, CURVE, PAGE = "summary.json", "learning_curve.png", "trajectories.html"
PHASES = ("rollout", "score", "update", "push")
log = logging.getLogger(__name__)


class RunSummary(Observer):
    """RunSummary is a callback that reports a finished, stopped or failed run: first and last
    reward and evaluation score, duration, where the outputs are and how to look at them. It runs on
    the main process only, after the callbacks that write the outputs.
    """

    def __init__(self, config: RunConfig, sets: Sequence[str]):
        """Stores the settings. `sets`: names of the evaluation sets."""
        self.config = config
        self.output = Path(config.trainer.output)
        self.trained = "reward" if config.algorithm.task == "rl" else "loss"
        self.scores = evaluation_scores(config, sets)
        self.begun = time.monotonic()  # the models are built

    def on_end(self, trainer: Any) -> None:
        self._report(trainer, "stopped" if trainer.stopped else "finished")

    def on_failed(self, trainer: Any) -> None:
        self._report(trainer, "failed")

    def _report(self, trainer: Any, ended: str) -> None:
        history = read_history(self.output / "metrics.jsonl")
        if len(history) < 2:  # no step was taken
            return
        scores = [score.named(history) for score in self.scores]
        result = summary(self.config, history, self.trained, scores)
        result |= {"ended": ended, "seconds": round(time.monotonic() - self.begun, 1)}
        path = self.output / SUMMARY
        with writing(path, warn=True):
            path.write_text(json.dumps(result, indent=2) + "\n")
        curve = self._drawn(history, scores)
        log.info("%s", "\n".join(self._lines(result, scores, curve)))

    def _drawn(self, history: Sequence[Step], scores: Sequence[EvaluationScore]) -> str:
        """Draws the learning curve. Returns its path, or why there is none."""
        path = self.output / CURVE
        try:
            from rftmega.monitoring.observers.learning_curve import draw
        except ImportError:
            return "not drawn, since matplotlib is not installed"
        with writing(path, warn=True):
            draw(history, self.trained, scores, self.output.name, path)
        return str(path)

    def _lines(
        self, result: dict[str, Any], scores: Sequence[EvaluationScore], curve: str
    ) -> list[str]:
        of, output = self.config.trainer.steps, shlex.quote(str(self.output))
        reached = [
            f"{score.title} {_change(result['evaluation'][score.metric], score)}"
            for score in scores
            if score.metric in result["evaluation"]
        ]
        phases = [f"{name} {seconds:.3g} s" for name, seconds in result["step_seconds"].items()]
        lines = {
            f"Run {result['ended']}": f"{result['steps']} of {of} steps, {_duration(result['seconds'])}",
            self.trained: _change(result[self.trained]) if self.trained in result else "unknown",
            "evaluation": ", ".join(reached) or "none (data.eval)",
            "time of a step": ", ".join(phases) or "unknown",
            "model": result["model"] or "not exported",
            "metrics": str(self.output / "metrics.jsonl"),
            "summary": str(self.output / SUMMARY),
            "learning curve": curve,
            "page of completions": self._page(output),
            "all curves": f"{program('tensorboard')} --logdir {output}",
        }
        return [f"{name:<20} {text}" for name, text in lines.items()]

    def _page(self, output: str) -> str:
        """Returns the command that makes the page of the run in the folder `output`, or why there is
        none.
        """
        if self.config.algorithm.task != "rl":
            return "none, since nothing is generated"
        if not list(self.output.glob("trajectories/step_*")):
            return "none (trainer.trajectories=0)"
        return f"{program('rftmega')} view {output}, which writes {PAGE} there"


def summary(
    config: RunConfig, history: Sequence[Step], trained: str, scores: Sequence[EvaluationScore]
) -> dict[str, Any]:
    """Returns the summary of a run as a JSON-serializable object. `history`: lines of
    metrics.jsonl; `trained`: the metric of training that it contains, the reward or the loss;
    `scores`: the main scores of the evaluation sets.
    """
    names = [trained, *(score.metric for score in scores)]
    found = {
        name: change._asdict()
        for name, change in changes(history, re.compile("|".join(map(re.escape, names)))).items()
    }
    times = {phase: [step.get(f"seconds_{phase}") for step in history[1:]] for phase in PHASES}
    known = {phase: [x for x in own if x is not None] for phase, own in times.items()}
    gaps = [gap for step in history if (gap := step.get("logprob_gap_max")) is not None]
    model, split = Path(config.exported), config.parallel
    ranks = split.tensor * split.pipeline * split.context
    return {
        "task": config.algorithm.task,
        "layout": f"TP{split.tensor} x PP{split.pipeline} x CP{split.context} x DP{whole_number('WORLD_SIZE', 1) // ranks}",
        "steps": int(history[-1]["step"] or 0),
        **({trained: found.pop(trained)} if trained in found else {}),
        "evaluation": {
            score.metric: {"what": score.what, **found[score.metric]}
            for score in scores
            if score.metric in found
        },
        **({"logprob_gap_max": max(gaps)} if gaps else {}),
        "step_seconds": {
            phase: round(sum(own) / len(own), 3) for phase, own in known.items() if own
        },
        "model": str(model) if model.is_dir() else None,
    }


def program(name: str) -> str:
    """Returns how to start a program of this Python environment: its name if the shell finds it,
    else its path, relative to the working directory if it is inside.
    """
    own = Path(sys.executable).with_name(name)
    if shutil.which(name) or not own.is_file():
        return name
    shown = os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
    return shlex.quote(shown)


def _change(change: dict[str, Any], score: EvaluationScore | None = None) -> str:
    def said(value: float) -> str:
        return score.text(value) if score else f"{value:.3g}"

    first = f"{said(change['first'])} (step {change['first_step']})"
    if change["first_step"] == change["last_step"]:
        return first
    return f"{first} -> {said(change['last'])} (step {change['last_step']})"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
