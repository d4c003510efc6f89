"""Metric publishers: Weights & Biases, MLflow, trackio, and a Prometheus endpoint. The first three
have the names of metric_groups, Prometheus those of metrics.jsonl.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rftmega.config import RunConfig, without_secrets
from rftmega.config.load import flatten
from rftmega.core.errors import ConfigError
from rftmega.core.types import Metrics
from rftmega.monitoring.metric_groups import grouped_metrics
from rftmega.monitoring.observers.evaluation_table import EvaluationTable, ShownCompletion
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.output_files import set_aside

PARAMETERS = 100  # most that MLflow accepts at once
LONGEST_PARAMETER = 6000


# wandb's settings; its metadata contains the command line, which may include secrets
QUIET: dict[str, Any] = {
    **{"console": "off", "silent": True},
    **{"disable_git": True, "disable_code": True, "x_disable_meta": True},
}


class WandB(Observer):
    """WandB is a callback that logs metrics, config and completions of evaluations (a table
    eval/completions) to Weights & Biases, configured by wandb's
    own environment variables (WANDB_MODE=offline writes into a folder). A resumed run continues
    under the id that is stored in output/wandb.id.
    """

    def __init__(self, project: str, config: RunConfig, completions: EvaluationTable | None = None):
        self.project, self.config, self.completions = project, config, completions

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        output = Path(self.config.trainer.output)
        with temporary_files_in(output / "wandb" / "temporary", of="wandb"):
            import wandb  # optional, and slow to import

        self.table = wandb.Table
        self.run = wandb.init(
            project=self.project,
            id=remembered(output / "wandb.id", trainer, lambda: uuid.uuid4().hex),
            resume="allow",
            name=output.name,
            dir=output,
            config=without_secrets(self.config),
            settings=wandb.Settings(**QUIET),
        )
        self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        logged: dict[str, Any] = {**grouped_metrics(metrics)}
        found = self.completions
        if found and found.step == trainer.step and found.rows:
            logged["eval/completions"] = self.table(
                columns=list(ShownCompletion._fields), data=found.rows
            )
        self.run.log(logged, step=trainer.step)

    def on_end(self, trainer: Any) -> None:
        self.run.finish()

    def on_failed(self, trainer: Any) -> None:
        self.run.finish(exit_code=1)


@contextmanager
def temporary_files_in(folder: Path, *, of: str) -> Iterator[None]:
    """Context manager for importing the package `of` so that it creates its temporary files in
    `folder`; files that a killed run has left there are removed first. Has no effect if the package
    is already imported.
    """
    if of in sys.modules:  # the package was imported before
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder.resolve())
    try:
        yield
    finally:
        tempfile.tempdir = before


class MLflow(Observer):
    """MLflow is a callback that logs metrics, and the options as parameters, to MLflow, configured
    by MLflow's own environment variables (MLFLOW_TRACKING_URI; default: the folder output/mlruns).
    A resumed run continues under the id that is stored in output/mlflow.id.
    """

    def __init__(self, experiment: str, config: RunConfig):
        self.experiment, self.config = experiment, config

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        output = Path(self.config.trainer.output)
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # otherwise MLflow requires a database
            os.environ["MLFLOW_TRACKING_URI"] = f"file://{(output / 'mlruns').resolve()}"
        from mlflow import MlflowClient  # optional, and slow to import

        self.client: Any = MlflowClient()
        self.run = remembered(output / "mlflow.id", trainer, lambda: self._begun(output.name))
        self.client.update_run(self.run, status="RUNNING")
        self.on_step(trainer, metrics)

    def _begun(self, name: str) -> str:
        from mlflow.entities import Param

        known = self.client.get_experiment_by_name(self.experiment)
        where = known.experiment_id if known else self.client.create_experiment(self.experiment)
        run: str = self.client.create_run(where, run_name=name).info.run_id
        options = flatten(without_secrets(self.config))
        given = [
            Param(name, json.dumps(value)[:LONGEST_PARAMETER]) for name, value in options.items()
        ]
        for first in range(0, len(given), PARAMETERS):
            self.client.log_batch(run, params=given[first : first + PARAMETERS])
        return run

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        told = [
            Metric(name, value, now, trainer.step)
            for name, value in grouped_metrics(metrics).items()
        ]
        self.client.log_batch(self.run, metrics=told)

    def on_end(self, trainer: Any) -> None:
        self.client.set_terminated(self.run, "KILLED" if trainer.stopped else "FINISHED")

    def on_failed(self, trainer: Any) -> None:
        self.client.set_terminated(self.run, "FAILED")


class Trackio(Observer):
    """Trackio is a callback that logs metrics and config with trackio, into a file in trackio's own
    folder (TRACKIO_DIR), which `trackio show` displays. A resumed run continues under the name that
    is stored in output/trackio.id.
    """

    def __init__(self, project: str, config: RunConfig):
        self.project, self.config = project, config

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        import trackio  # optional

        output = Path(self.config.trainer.output)
        self.run = trackio.init(
            project=self.project,
            name=remembered(
                output / "trackio.id", trainer, lambda: f"{output.name}-{uuid.uuid4().hex[:8]}"
            ),
            resume="allow",
            config=without_secrets(self.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.run.log(grouped_metrics(metrics), step=trainer.step)

    def on_end(self, trainer: Any) -> None:
        self.run.finish()

    def on_failed(self, trainer: Any) -> None:
        self.run.finish()


def remembered(path: Path, trainer: Any, made: Callable[[], str]) -> str:
    """Returns the id under which an external service such as wandb knows the run, from the file
    `path`. A run that is not resumed stores a new id there, which `made` returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not trainer.resumed:
        set_aside(path)
    if not path.is_file():
        path.write_text(made())
    return path.read_text()


class Prometheus(Observer):
    """Prometheus is a callback that serves the last step's metrics at http://host:port/metrics, as
    gauges rftmega_<metric> and rftmega_step.

    Raises ConfigError at the start of the run if the port can't be opened.
    """

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port
        self.registry = CollectorRegistry()
        self.gauges: dict[str, Gauge] = {}

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        try:
            self.server, self.thread = start_http_server(
                self.port, addr=self.host, registry=self.registry
            )
        except OSError as error:
            raise ConfigError(
                f"logging.prometheus_port={self.port} can't be opened on {self.host} ({error.strerror}). Choose another."
            ) from error
        self.port = self.server.server_port
        self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        for name, value in {**metrics, "step": trainer.step}.items():
            named = f"rftmega_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if named not in self.gauges:
                self.gauges[named] = Gauge(
                    named, f"{name} of the last step; docs/monitoring.md", registry=self.registry
                )
            self.gauges[named].set(value)

    def on_end(self, trainer: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def on_failed(self, trainer: Any) -> None:
        self.on_end(trainer)
