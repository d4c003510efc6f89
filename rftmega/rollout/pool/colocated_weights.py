"""Weight sync for engines that share devices with the trainer: loads the policy onto the device
before its weights are pushed to the engines.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from rftmega.core.interfaces import LateWeights, WeightSync
from rftmega.core.shards import Shard, lost_share
from rftmega.core.types import Metrics, SliceChecksums
from rftmega.rollout.engines.base import Engine
from rftmega.rollout.engines.draft_counts import acceptance_metrics
from rftmega.runtime.parallel.collectives import all_reduce

sum_of_all: Any = partial(all_reduce, op="sum")


class Phases(Protocol):
    """Phases is the interface that switches the device's memory between trainer, weight push and
    engine; `run.placement.phases.DevicePhases` implements it.
    """

    def rollout(self) -> None: ...

    def push(self) -> None: ...

    def pushed(self, buffer_bytes: int) -> Metrics:
        """Ends the push phase. `buffer_bytes`: bytes of the buffers that the push used. Returns
        metrics of the device memory in use.
        """


class ColocatedWeights:
    """ColocatedWeights is a WeightSync that first loads the policy onto the device (`phases`), and
    then pushes through another WeightSync (`weights`).
    """

    def __init__(
        self,
        weights: WeightSync,
        phases: Phases,
        merged: Sequence[Shard] | None = None,
        *,
        engine: Engine | None = None,
    ):
        """Wraps `weights`, the WeightSync that sends the weights. `engine`: this process's engine,
        whose counts of speculative decoding are added to the metrics of a push. `merged`: shards
        whose LoRA adapters are merged into lower-precision weights for a push, which then reports
        the share of the update lost to rounding; None (on all processes) if no adapters are merged.
        """
        self.weights, self.phases, self.engine, self.merged = weights, phases, engine, merged

    def push(self, *, version: int) -> Metrics:
        self.phases.push()
        metrics = self.weights.push(version=version)
        if self.merged is not None:
            metrics["push_lost_share"] = lost_share(self.merged, sum_of_all)
        if self.engine and self.engine.draft_tokens:
            counts = torch.tensor(self.engine.draft_counts(), dtype=torch.float64)
            metrics |= acceptance_metrics(sum_of_all(counts).tolist())
        return metrics | self.phases.pushed(int(metrics["push_buffer_bytes"]))

    def push_to_late(self) -> int:
        """Sends the last push's weights to engines that have joined since then. Returns the number
        of engines that have received them; 0 if the weight sync does not support this
        (LateWeights).
        """
        if not isinstance(self.weights, LateWeights):
            return 0
        self.phases.push()
        return self.weights.push_to_late()

    def checksums(self) -> list[SliceChecksums]:
        self.phases.push()
        return self.weights.checksums()
