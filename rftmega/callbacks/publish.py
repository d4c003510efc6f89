"""Metrics for programs that watch many runs: Weights & Biases, and Prometheus, which comes and
asks.
"""

import re
import uuid
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from rftmega.callbacks.observer import Observer
from rftmega.callbacks.output_files import set_aside
from rftmega.config import RunConfig, without_secrets
from rftmega.errors import ConfigError
from rftmega.types import Metrics


class WandB(Observer):
    """Metrics and config. Where to, and under which key, is wandb's own business
    (WANDB_MODE=offline: a folder). A run that is resumed goes on as the one that it was, by its id
    in output/wandb.id.
    """

    def __init__(self, project: str, config: RunConfig):
        self.project, self.config = project, config

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        import wandb  # optional, and slow to import

        output = Path(self.config.trainer.output)
        output.mkdir(parents=True, exist_ok=True)
        known = output / "wandb.id"
        if not trainer.resumed:
            set_aside(known)
        if not known.is_file():
            known.write_text(uuid.uuid4().hex)
        self.run = wandb.init(
            project=self.project,
            id=known.read_text(),
            resume="allow",
            name=output.name,
            dir=output,
            config=without_secrets(self.config),
            # Its metadata holds the command line, and with it what an option there keeps secret.
            settings=wandb.Settings(
                console="off", disable_git=True, disable_code=True, x_disable_meta=True, silent=True
            ),
        )
        self.on_step(trainer, metrics)

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        self.run.log(dict(metrics), step=trainer.step)

    def on_end(self, trainer: Any) -> None:
        self.run.finish()


class Prometheus(Observer):
    """The last step's metrics at http://host:port/metrics, as gauges rftmega_<metric>, and
    rftmega_step.

    Raises ConfigError at the start where something else listens there.
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
                    named, f"{name} of the last step; docs/watching.md", registry=self.registry
                )
            self.gauges[named].set(value)

    def on_end(self, trainer: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
