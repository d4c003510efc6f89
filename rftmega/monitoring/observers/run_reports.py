"""Reports of a run: its options as a file, and log messages about skipped optimizer steps and how to
continue a stopped or complete run.
"""

import json
import logging
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig, without_secrets
from rftmega.core.types import Metrics
from rftmega.monitoring.history import CONFIG
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import writing

log = logging.getLogger(__name__)
MODELS = {"": "model", "critic_": "critic"}  # prefix of the metrics -> name of the model


class RunReports(Observer):
    """RunReports is a callback that logs skipped optimizer steps, and how to continue a stopped or
    complete run, and writes the run's options to its output folder. It runs on the main process
    only.
    """

    def __init__(self, config: RunConfig):
        self.config = config
        self.steps, self.code = config.trainer.steps, config.faults.requeue_code
        output = Path(config.trainer.output)
        self.saved = Path(config.checkpoint.folder or output / "checkpoints")
        self.model = Path(config.exported)

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        self._write_options()
        if trainer.resumed and trainer.step >= self.steps:
            log.info(
                "This run is complete: it has taken %d steps, and trainer.steps=%d. Raise trainer.steps to go on; "
                "checkpoint.resume=none begins anew.%s",
                trainer.step,
                self.steps,
                f" The model is in {self.model}." if self.model.is_dir() else "",
            )

    def _write_options(self) -> None:
        path = Path(self.config.trainer.output) / CONFIG
        with writing(path, warn=self.config.checkpoint.on_failure == "warn"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(without_secrets(self.config), indent=2) + "\n")

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        for prefix, name in MODELS.items():
            if skipped := int(metrics.get(f"{prefix}skipped_steps", 0)):
                of = skipped + int(metrics.get(f"{prefix}optimizer_steps", 0))
                log.warning(
                    "step %d: %d of %d optimizer steps of the %s were skipped, since a gradient was NaN or infinite; its weights "
                    "stay as they were. The run ends after faults.max_skipped_steps such steps in a row.",
                    trainer.step,
                    skipped,
                    of,
                    name,
                )

    def on_end(self, trainer: Any) -> None:
        if trainer.stopped:
            log.info(
                "Stopped by a signal after step %d of %d, and saved in %s (exit code %d). The same command goes on from there; "
                "`rftmega convert to-hf %s OUT` makes a Hugging Face folder of the model.",
                trainer.step,
                self.steps,
                self.saved,
                self.code,
                self.saved,
            )
