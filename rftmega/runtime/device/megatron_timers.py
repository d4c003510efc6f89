"""Implements Megatron's timing hook (`config.timers`): everything that Megatron times, such as
pipeline schedules, communication and gradient reductions, is recorded as a span.
"""

from typing import NamedTuple

from rftmega.runtime.device.spans import BACKWARD, FORWARD, SCHEDULE, recorder

# Megatron's timer names -> names of spans
NAMES = {"forward-compute": FORWARD, "backward-compute": BACKWARD, "forward-backward": SCHEDULE}


class Timer(NamedTuple):
    """Timer records a span through the interface of Megatron's timers (`start`, `stop`)."""

    name: str

    def start(self, barrier: bool = False) -> None:
        """Starts the span; ignores `barrier`, which would change the timing of the run."""
        recorder.start(self.name)

    def stop(self, barrier: bool = False) -> None:
        recorder.finish(self.name)


class Timers:
    """Timers is the object that Megatron calls for a Timer, with the timer's name and a log level,
    which is ignored.
    """

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        return Timer(NAMES.get(name, name))
