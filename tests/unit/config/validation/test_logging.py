import importlib.metadata

import pytest

from rftmega.config import LoggingConfig, RunConfig, TrainerConfig
from rftmega.config.validation.logging import logging_options


def refused(**options: object) -> list[str]:
    return logging_options(
        RunConfig(trainer=TrainerConfig(steps=5), logging=LoggingConfig(**options))
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("timeline", [[3], [3, 2], [0, 2], [2, 6], [1, 2, 3]])
def test_a_timeline_is_of_steps_that_there_are(timeline: list[int]) -> None:
    (reason,) = refused(timeline=timeline)
    assert reason.startswith(
        f"logging.timeline={timeline} must be a first and a last step, from 1 to trainer.steps=5"
    )


def test_what_can_be_recorded_and_published_is_not_refused() -> None:
    assert (
        refused()
        == refused(timeline=[1, 5], prometheus_port=9100, prometheus_host="10.0.0.1")
        == []
    )


def test_ports_that_there_are_not_and_a_host_without_a_port_are_refused() -> None:
    assert "must be a port" in refused(prometheus_port=70000)[0]
    assert "needs logging.prometheus_port" in refused(prometheus_host="0.0.0.0")[0]


def test_wandb_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr("rftmega.config.validation.logging.version", version)
    (reason,) = refused(wandb="a")
    assert reason.endswith("Install it: pip install 'rftmega[wandb]'.")
    monkeypatch.setattr("rftmega.config.validation.logging.version", lambda package: "1.0")
    assert refused(wandb="a") == []
