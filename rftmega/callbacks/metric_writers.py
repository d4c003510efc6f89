"""Progress, JSONLines and TensorBoard show and write the metrics of every step."""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rftmega.callbacks.observer import Observer
from rftmega.callbacks.output_files import set_aside, synchronise
from rftmega.types import Metrics

log = logging.getLogger(__name__)
SHOWN = {  # metric -> its name in the line of a step
    "loss": "loss",
    "accuracy": "accuracy",
    "grad_norm": "grad norm",
    "reference_kl": "KL",
    "entropy": "entropy",
    "logprob_gap_max": "gap",
}


class Progress(Observer):
    """One bar, and a line for each evaluation."""

    def __init__(self, steps: int, accuracy: Mapping[str, str]):
        """`accuracy`: name of a held-out set ("" where there is but one) -> metric that is shown of
        it.
        """
        self.steps = steps
        self.accuracy = accuracy

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self._say(metrics, f"after step {trainer.step}" if trainer.step else "before training")
        self.bar = tqdm(total=self.steps, initial=trainer.step, unit="step", dynamic_ncols=True)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.bar.set_postfix_str(status(metrics), refresh=False)
        self.bar.update()
        self._say(metrics, f"after step {trainer.step}")

    def on_end(self, trainer: Any) -> None:
        self.bar.close()

    def _say(self, metrics: Metrics, when: str) -> None:
        found = [
            f"{name} {_share(metrics[metric])}".strip()
            for name, metric in self.accuracy.items()
            if metric in metrics
        ]
        if found:
            tqdm.write(f"held-out accuracy {when}: {', '.join(found)}")


def status(metrics: Metrics) -> str:
    """Returns a step in a line: what it learnt, how long answers were, and how fast it was."""
    said = []
    if "reward" in metrics:
        said.append(f"reward {metrics['reward']:.3g} ±{metrics.get('spread', 0):.2g}")
        said.append(f"{metrics['response_length']:.0f} tokens an answer")
        seconds = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
        if seconds:
            said.append(f"{metrics['generated_tokens'] / seconds:.3g} tokens/s")
    for metric, name in SHOWN.items():
        if metric in metrics:  # a frozen policy has no loss
            said.append(f"{name} {metrics[metric]:.3g}")
    return ", ".join(said)


def _share(value: float) -> str:
    """Shows a share in percent, and what is none as a number: a reward function may give any."""
    return f"{value:.1%}" if 0 <= value <= 1 else f"{value:.3g}"


class JSONLines(Observer):
    """Every step's metrics, one JSON object a line, flushed at once, and on the disk when a
    checkpoint is.

    A resumed run keeps the lines of the steps before. Lines that it does not keep, and what is no
    line of metrics, go to a file beside, metrics.left_out.jsonl.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.left_out = self.path.with_name(f"{self.path.stem}.left_out{self.path.suffix}")

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not trainer.resumed:
            set_aside(self.path)
        elif self.path.is_file():
            self._keep_until(trainer.step)
        self.file = self.path.open("a")
        if not trainer.resumed:
            self.on_step(trainer, metrics)

    def _keep_until(self, step: int) -> None:
        """Keeps the lines up to a step.

        Those that are left out are written down first: whatever happens, no line is lost.
        """
        kept, later, bad = sorted_out(self.path.read_bytes(), step)
        for number in bad:
            log.warning(
                "%s:%d: is no line of metrics, and is left out; it is in %s.",
                self.path,
                number,
                self.left_out.name,
            )
        if later:
            again = f"{len(later)} step(s) after {step} are done again"
            log.info("%s: %s; the lines are in %s.", self.path, again, self.left_out.name)
        if others := [*later, *bad.values()]:
            with self.left_out.open("ab") as file:
                _write_down(file, others)
        draft = self.path.with_name(f".{self.path.name}.draft")
        with draft.open("wb") as file:
            _write_down(file, kept)
        draft.rename(self.path)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.file.write(
            json.dumps({"step": trainer.step, "time": time.time(), **_finite(metrics)}) + "\n"
        )
        self.file.flush()

    def on_save(self, trainer: Any) -> None:
        os.fsync(self.file.fileno())
        synchronise(self.path.parent)

    def on_end(self, trainer: Any) -> None:
        self.file.close()


def sorted_out(content: bytes, step: int) -> tuple[list[bytes], list[bytes], dict[int, bytes]]:
    """Returns the lines of a metrics file up to that step, those after it, and by its number what
    is none: a process that was killed leaves half a line, a machine that lost its power zeros.
    """
    kept, later, bad = [], [], {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("step"), int):
            bad[number] = line
        elif said["step"] <= step:
            kept.append(line)
        else:
            later.append(line)
    return kept, later, bad


def _write_down(file: BinaryIO, lines: Iterable[bytes]) -> None:
    file.writelines(line + b"\n" for line in lines)
    file.flush()
    os.fsync(file.fileno())


def _finite(metrics: Metrics) -> dict[str, float | None]:
    """Replaces what is not finite by None: JSON knows no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class TensorBoard(Observer):
    """Every step's metrics as scalars."""

    def __init__(self, folder: str | Path):
        self.folder = str(folder)

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        if not trainer.resumed:
            set_aside(Path(self.folder))
        self.writer = SummaryWriter(
            self.folder, purge_step=trainer.step + 1 if trainer.resumed else None
        )
        if not trainer.resumed:
            self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, trainer.step)

    def on_save(self, trainer: Any) -> None:
        self.writer.flush()

    def on_end(self, trainer: Any) -> None:
        self.writer.close()
