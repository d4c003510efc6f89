"""What happens beside the step: progress, metrics, evaluation, export. The step itself knows none of it."""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rftmega.interfaces import Reward
from rftmega.types import Metrics, Prompt


class Observer:
    """Does nothing at every occasion; a callback overrides what it cares for."""

    def on_start(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None: ...

    def on_step(self, trainer: Any, metrics: Metrics) -> None: ...

    def on_end(self, trainer: Any) -> None: ...


class Evaluate(Observer):
    """Greedy answers to held-out prompts: at the start, every `every` steps (0: never between) and after the last step."""

    def __init__(self, prompts: Sequence[Prompt], reward: Reward, *, every: int, last: int):
        self.prompts, self.reward = prompts, reward
        self.every, self.last = every, last

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        metrics |= self.evaluate(trainer)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        if trainer.step == self.last or (self.every and trainer.step % self.every == 0):
            metrics |= self.evaluate(trainer)

    def evaluate(self, trainer: Any) -> Metrics:
        """Mean of every reward part over the held-out prompts that it scores."""
        begin = time.perf_counter()
        completions = trainer.engine.generate(self.prompts, seeds=[0] * len(self.prompts), temperature=0.0)
        values: dict[str, list[float]] = {}
        for score in self.reward(self.prompts, completions):
            for name, value in score.items():
                values.setdefault(f"eval_{name}", []).append(value)
        mean = {name: sum(each) / len(each) for name, each in values.items()}
        return mean | {"eval_seconds": time.perf_counter() - begin}


class Progress(Observer):
    """One bar."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self._say(metrics, "before training")
        self.bar = tqdm(total=self.steps, initial=trainer.step, unit="step", dynamic_ncols=True)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        shown = {name: f"{metrics[name]:.3g}" for name in ("reward", "loss", "grad_norm", "logprob_gap_max")}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        self._say(metrics, f"after step {trainer.step}")

    def on_end(self, trainer: Any) -> None:
        self.bar.close()

    def _say(self, metrics: Metrics, when: str) -> None:
        if "eval_exact_match" in metrics:
            tqdm.write(f"held-out accuracy {when}: {metrics['eval_exact_match']:.1%}")


class JSONLines(Observer):
    """Every step's metrics, one JSON object a line, flushed at once."""

    def __init__(self, path: str | Path):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.file.write(json.dumps({"step": trainer.step, "time": time.time(), **_finite(metrics)}) + "\n")
        self.file.flush()

    def on_end(self, trainer: Any) -> None:
        self.file.close()


def _finite(metrics: Metrics) -> dict[str, float | None]:
    """JSON knows no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class TensorBoard(Observer):
    """Every step's metrics as scalars."""

    def __init__(self, folder: str | Path):
        self.writer = SummaryWriter(str(folder))

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, trainer.step)

    def on_end(self, trainer: Any) -> None:
        self.writer.close()


class AtEnd(Observer):
    """Runs `work` once, after the last step."""

    def __init__(self, work: Callable[[], None]):
        self.work = work

    def on_end(self, trainer: Any) -> None:
        self.work()
