"""A metric that counts names of control tokens (e.g. <|im_end|>) in the text of training data."""

from typing import Any

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer


class ControlTokensInData(Observer):
    """ControlTokensInData is a callback that adds the metric data_control_tokens to each step:
    `count`, how often names of control tokens occurred in the records that were read. Only records
    of a run whose option data.control_tokens permits such names are counted.
    """

    def __init__(self, count: int):
        self.count = count

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        metrics["data_control_tokens"] = float(self.count)
