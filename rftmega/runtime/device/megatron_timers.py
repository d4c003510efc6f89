"""Megatron's own hook for timing (`config.timers`): what its schedules, messages and reductions do
becomes a span.
"""

from typing import NamedTuple

from rftmega.runtime.device.spans import BACKWARD, FORWARD, SCHEDULE, recorder

# Megatron's -> ours
NAMES = {"forward-compute": FORWARD, "backward-compute": BACKWARD, "forward-backward": SCHEDULE}


class Timer(NamedTuple):
    """One of Megatron's."""

    name: str

    def start(self, barrier: bool = False) -> None:
        """Starts, and never with a barrier: it would be a run of another kind that is timed."""
        recorder.start(self.name)

    def stop(self, barrier: bool = False) -> None:
        recorder.finish(self.name)


class Timers:
    """Called with the name, and the level, of what is timed."""

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        return Timer(NAMES.get(name, name))
