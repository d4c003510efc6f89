"""Implements Megatron's timing hook (`config.timers`): its schedules, messages and reductions
become spans.
"""

from typing import NamedTuple

from rftmega.runtime.device.spans import BACKWARD, FORWARD, SCHEDULE, recorder

# Megatron's names -> ours
NAMES = {"forward-compute": FORWARD, "backward-compute": BACKWARD, "forward-backward": SCHEDULE}


class Timer(NamedTuple):
    """Timer records a span under the interface of Megatron's timers."""

    name: str

    def start(self, barrier: bool = False) -> None:
        """Starts the span, never with a barrier, which would change the run that is timed."""
        recorder.start(self.name)

    def stop(self, barrier: bool = False) -> None:
        recorder.finish(self.name)


class Timers:
    """Timers returns the Timer of a name and a level, as Megatron asks for it."""

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        return Timer(NAMES.get(name, name))
