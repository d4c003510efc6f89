"""Counts names of control tokens in the data."""

from typing import Any

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer


class ControlTokensInData(Observer):
    """ControlTokensInData adds the metric data_control_tokens: how many names of control tokens the
    records that a run has read hold, where data.control_tokens lets them in.
    """

    def __init__(self, count: int):
        self.count = count

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        metrics["data_control_tokens"] = float(self.count)
