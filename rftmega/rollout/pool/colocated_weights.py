"""ColocatedWeights brings the policy to the device before its weights move."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from rftmega.core.interfaces import LateWeights, WeightSync
from rftmega.core.shards import Shard, lost_share
from rftmega.core.types import Metrics, SliceChecksums
from rftmega.runtime.parallel.collectives import all_reduce

sum_of_all: Any = partial(all_reduce, op="sum")


class Phases(Protocol):
    """Phases gives the device to whoever works next (`strategy.phases.DevicePhases`)."""

    def rollout(self) -> None: ...

    def push(self) -> None: ...

    def pushed(self, buffer_bytes: int) -> Metrics:
        """Ends the push, whose buffers took so many bytes. Returns what was measured of memory."""


class ColocatedWeights:
    """ColocatedWeights is a WeightSync that gives the device to the policy first."""

    def __init__(self, weights: WeightSync, phases: Phases, merged: Sequence[Shard] | None = None):
        """`merged`: shards whose adapters are added and rounded for a push, which tells of it; None,
        on all processes alike: nothing is.
        """
        self.weights, self.phases, self.merged = weights, phases, merged

    def push(self, *, version: int) -> Metrics:
        self.phases.push()
        metrics = self.weights.push(version=version)
        if self.merged is not None:
            metrics["push_lost_share"] = lost_share(self.merged, sum_of_all)
        return metrics | self.phases.pushed(int(metrics["push_buffer_bytes"]))

    def push_to_late(self) -> int:
        """Does what LateWeights does; 0 where all engines get their weights at once."""
        if not isinstance(self.weights, LateWeights):
            return 0
        self.phases.push()
        return self.weights.push_to_late()

    def checksums(self) -> list[SliceChecksums]:
        self.phases.push()
        return self.weights.checksums()
