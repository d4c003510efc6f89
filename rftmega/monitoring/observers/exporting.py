"""A callback that exports the trained model after the last step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import AtEnd
from rftmega.monitoring.observers.output_files import set_aside


class Exporting(AtEnd):
    """Exporting is a callback that calls `work`, which exports the model, after the last step. At
    the start of a run that is not resumed, it renames the existing folders among `folders`, for
    example policy to policy.1, so that nothing is overwritten.
    """

    def __init__(self, work: Callable[[], None], folders: Sequence[str], *, is_main: bool):
        super().__init__(work)
        self.folders, self.is_main = folders, is_main

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        if self.is_main and not trainer.resumed:
            for folder in self.folders:
                set_aside(Path(folder))
