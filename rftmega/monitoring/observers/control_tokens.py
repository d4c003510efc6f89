"""A metric for names of control tokens in the data."""

from typing import Any

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer


class ControlTokensInData(Observer):
    """ControlTokensInData adds the metric data_control_tokens: the number of control-token names in
    the records read, where data.control_tokens permits them.
    """

    def __init__(self, count: int):
        self.count = count

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        metrics["data_control_tokens"] = float(self.count)
