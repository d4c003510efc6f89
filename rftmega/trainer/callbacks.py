"""What happens beside the step: progress, metrics, export (and `evaluate.py`, `trajectories.py`). The step knows none of it."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rftmega.types import Experience, Metrics, Samples


class Observer:
    """Does nothing at every occasion; a callback overrides what it cares for."""

    def on_start(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None: ...

    def on_experience(self, trainer: Any, samples: Samples, experience: Experience) -> None: ...

    def on_step(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_given_up(self, trainer: Any) -> None: ...

    def on_end(self, trainer: Any) -> None: ...


class Progress(Observer):
    """One bar, and a line for each evaluation."""

    def __init__(self, steps: int, accuracy: Mapping[str, str]):
        """`accuracy`: name of a held-out set ("" where there is but one) -> metric that is shown of it."""
        self.steps = steps
        self.accuracy = accuracy

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self._say(metrics, f"after step {trainer.step}" if trainer.step else "before training")
        self.bar = tqdm(total=self.steps, initial=trainer.step, unit="step", dynamic_ncols=True)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        names = ("reward", "loss", "grad_norm", "logprob_gap_max")
        shown = {name: f"{metrics[name]:.3g}" for name in names if name in metrics}  # a frozen policy has no loss
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        self._say(metrics, f"after step {trainer.step}")

    def on_end(self, trainer: Any) -> None:
        self.bar.close()

    def _say(self, metrics: Metrics, when: str) -> None:
        found = [f"{name} {metrics[metric]:.1%}".strip() for name, metric in self.accuracy.items() if metric in metrics]
        if found:
            tqdm.write(f"held-out accuracy {when}: {', '.join(found)}")


class JSONLines(Observer):
    """Every step's metrics, one JSON object a line, flushed at once. A resumed run keeps the lines of the steps before."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = lines_until(self.path, trainer.step) if trainer.resumed else []
        draft = self.path.with_name(f".{self.path.name}.draft")
        draft.write_text("".join(kept))
        draft.rename(self.path)
        self.file = self.path.open("a")
        if not trainer.resumed:
            self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.file.write(json.dumps({"step": trainer.step, "time": time.time(), **_finite(metrics)}) + "\n")
        self.file.flush()

    def on_end(self, trainer: Any) -> None:
        self.file.close()


def lines_until(path: Path, step: int) -> list[str]:
    """The lines of a metrics file up to that step; what a killed run did not finish writing is left out."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]


def _finite(metrics: Metrics) -> dict[str, float | None]:
    """JSON knows no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class TensorBoard(Observer):
    """Every step's metrics as scalars."""

    def __init__(self, folder: str | Path):
        self.folder = str(folder)

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self.writer = SummaryWriter(self.folder, purge_step=trainer.step + 1 if trainer.resumed else None)
        if not trainer.resumed:
            self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, trainer.step)

    def on_end(self, trainer: Any) -> None:
        self.writer.close()


class AtEnd(Observer):
    """Runs `work` once, after the last step; not where the run was stopped before."""

    def __init__(self, work: Callable[[], None]):
        self.work = work

    def on_end(self, trainer: Any) -> None:
        if not trainer.stopped:
            self.work()
