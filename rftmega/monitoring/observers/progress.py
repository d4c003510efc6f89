"""Shows on the console how far a run is: a progress bar that fits the terminal, or a line for each
step in a log file; and a line for each evaluation.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.evaluation_score import EvaluationScore
from rftmega.monitoring.observers.health import UNDECIDED
from rftmega.monitoring.observers.observer import Observer

log = logging.getLogger(__name__)
BAR = "{n_fmt}/{total_fmt} |{bar:8}| {elapsed}<{remaining}{postfix}"
SHOWN = {  # metric -> its name in the progress bar, the most important first
    "accuracy": "accuracy",
    "reference_kl": "KL",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad norm",
    "logprob_gap_max": "gap",
}
LOGGED = {  # metric -> its name in a log file
    "spread": "reward_std",
    "accuracy": "accuracy",
    "reference_kl": "KL",
    "clip_fraction": "clipped",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
    "logprob_gap_max": "gap",
    "response_length": "length",
    "truncated": "cut off",
}


class Progress(Observer):
    """Progress is a callback that shows a progress bar with metrics of the last step, as many as fit
    the terminal, and prints a line for each evaluation. Log messages get lines of their own above
    the bar. Where stdout or stderr is no terminal, it prints one line per step (see `step_line`).
    """

    def __init__(
        self,
        steps: int,
        scores: Sequence[EvaluationScore] = (),
        seen: Callable[[], float] | None = None,
    ):
        """Stores the settings. `steps`: number of steps of the run; `scores`: main scores of the
        evaluation sets; `seen`: returns how many times the training data has been used so far.
        """
        self.steps, self.scores, self.seen = steps, scores, seen
        self.evaluations: list[Metrics] = []
        self.logs_above_bar = ExitStack()

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self._say(metrics, f"after step {trainer.step}" if trainer.step else "before training")
        shown = "TQDM_DISABLE" not in os.environ  # a notebook has its own display
        has_bar = shown and sys.stderr.isatty()
        self.prints_lines = shown and not (sys.stdout.isatty() and has_bar)
        self.bar = tqdm(
            total=self.steps,
            initial=trainer.step,
            unit="step",
            dynamic_ncols=True,
            bar_format=BAR,
            disable=not has_bar,
        )
        if has_bar:
            self.logs_above_bar.enter_context(logging_redirect_tqdm())

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        if not self.bar.disable:
            self.bar.n = trainer.step
            self.bar.set_postfix_str(fitting(parts(metrics), room_of(self.bar)))
        if self.prints_lines:
            seen = self.seen() if self.seen else None
            log.info("step %d/%d: %s", trainer.step, self.steps, step_line(metrics, seen))
        self._say(metrics, f"after step {trainer.step}")

    def on_end(self, trainer: Any) -> None:
        self.bar.close()
        self.logs_above_bar.close()

    def on_failed(self, trainer: Any) -> None:
        self.on_end(trainer)

    def _say(self, metrics: Metrics, when: str) -> None:
        if not any(score.metric in metrics for score in self.scores):
            return
        self.evaluations.append(metrics)
        found = [score.named(self.evaluations) for score in self.scores]
        told = [
            f"{score.title} {score.text(metrics[score.metric])}"
            for score in found
            if score.metric in metrics
        ]
        tqdm.write(f"evaluation {when}: {', '.join(told)}")


def parts(metrics: Metrics) -> list[str]:
    """Returns short texts about a step: its reward, response length, loss and similar metrics, as
    far as `metrics` has them, the most important first.
    """
    said = []
    if "reward" in metrics:
        said.append(f"reward {metrics['reward']:.3g} ±{metrics.get('spread', 0):.2g}")
        said.append(f"length {metrics['response_length']:.0f}")
    # a frozen policy has no loss
    said += [f"{name} {metrics[metric]:.3g}" for metric, name in SHOWN.items() if metric in metrics]
    seconds = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
    if seconds and "generated_tokens" in metrics:
        said.append(f"{metrics['generated_tokens'] / seconds:.3g} tokens/s")
    if seconds:
        said.append(f"{seconds:.3g} s/step")
    return said


def step_line(metrics: Metrics, seen: float | None = None) -> str:
    """Returns what a log file says about a step, as far as `metrics` has it: reward, its standard
    deviation and its components, KL, share of clipped tokens and further metrics of the update,
    lengths, memory, seconds of each phase. `seen`: how many times the training data has been used.
    """
    said = []
    if "reward" in metrics:
        components = [
            f"{name.removeprefix('reward_')} {value:.3g}"
            for name, value in metrics.items()
            if name.startswith("reward_") and not (name.endswith(UNDECIDED) and not value)
        ]
        known = f" ({', '.join(components)})" if components else ""
        said.append(f"reward {metrics['reward']:.3g}{known}")
    said += [
        f"{name} {metrics[metric]:.3g}" for metric, name in LOGGED.items() if metric in metrics
    ]
    memory = [x for name, x in metrics.items() if name.startswith("memory_mib_")]
    said += [f"memory {max(memory):.0f} MiB"] if memory else []
    phases = {name: x for name, x in metrics.items() if name.startswith("seconds_")}
    said += [f"{name.removeprefix('seconds_')} {x:.3g} s" for name, x in phases.items()]
    said += [] if seen is None else [f"data {seen:.1%}"]
    return ", ".join(said)


def status(metrics: Metrics) -> str:
    """Returns a one-line summary of a step: all of `parts`."""
    return ", ".join(parts(metrics))


def fitting(texts: Iterable[str], room: int | None) -> str:
    """Returns the first of `texts`, separated by commas, that take at most `room` characters
    together; all of them if `room` is None.
    """
    found = ""
    for text in texts:
        longer = f"{found}, {text}" if found else text
        if room is not None and len(longer) > room:
            break
        found = longer
    return found


def room_of(bar: "tqdm[Any]") -> int | None:
    """Returns how many characters of metrics fit behind a progress bar; None if it is not on a
    terminal.
    """
    known = bar.format_dict
    if known["ncols"] is None:
        return None
    alone = tqdm.format_meter(**(known | {"postfix": None, "ncols": 10**4}))
    # a comma and a space precede the metrics, and the last column stays free
    return int(known["ncols"]) - len(alone) - 3
