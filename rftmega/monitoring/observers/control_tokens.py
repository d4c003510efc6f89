"""A metric that counts control-token names in the data."""

from typing import Any

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer


class ControlTokensInData(Observer):
    """ControlTokensInData adds the metric data_control_tokens: the number of control-token names in
    the records that were read, if data.control_tokens permits such names.
    """

    def __init__(self, count: int):
        self.count = count

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        metrics["data_control_tokens"] = float(self.count)
