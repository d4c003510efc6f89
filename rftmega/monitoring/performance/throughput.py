"""Performance metrics of a step over all processes: throughput, FLOPs, padding, memory, and the
slowest process.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.types import Metrics
from rftmega.monitoring.observers.observer import Observer
from rftmega.runtime import device
from rftmega.runtime.device.spans import BACKWARD, FORWARD, REDUCE, SCHEDULE, recorder
from rftmega.runtime.parallel.collectives import gathered

# spans in which a process is busy itself
WORK = ("generate", FORWARD, BACKWARD, "offload", "onload", "load weights")
WAITS = ("receive weights",)  # nested in WORK
MEASURED = ("work", "mib", "idle")  # for each phase, by every process


class Throughput(Observer):
    """Throughput is a callback that adds performance metrics to each step's metrics. It runs on
    every process, before the metric writers.

    It performs one small collective operation per step.
    """

    def __init__(self, *, peak_tflops: float | None):
        """Starts measuring. `peak_tflops`: peak performance of one device in TFLOP/s, for the model
        FLOPs utilization (MFU); None if unknown.
        """
        self.peak_tflops = peak_tflops
        self.phases: dict[str, dict[str, float]] = {}  # of the current step
        recorder.measuring = True

    def on_start(self, trainer: Any, metrics: Metrics) -> None:
        recorder.take()  # discards spans from before the first step

    def on_phase(self, trainer: Any, name: str, seconds: float) -> None:
        sums = recorder.take()
        work = sum(sums.get(part, 0.0) for part in WORK) - sum(
            sums.get(part, 0.0) for part in WAITS
        )
        scheduled = sums.get(SCHEDULE, 0.0) - sums.get(REDUCE, 0.0)
        busy = sums.get(FORWARD, 0.0) + sums.get(BACKWARD, 0.0)
        self.phases[name] = sums | {
            "seconds": seconds,
            "work": work or seconds,  # without spans, all of it counts as work
            "mib": device.current().peak_bytes() / 2**20,
            "idle": 1 - busy / scheduled if scheduled else 0.0,
        }

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        if "update" in self.phases:
            self.phases["update"] |= trainer.counts  # includes optimizer steps from before a resume
        metrics |= self._everybodys() | self._efficiency(metrics)
        self.phases = {}
        recorder.take()  # discards spans of an evaluation

    def on_end(self, trainer: Any) -> None:
        recorder.measuring = False

    def on_failed(self, trainer: Any) -> None:
        recorder.measuring = False

    def _everybodys(self) -> Metrics:
        mine = torch.tensor(
            [[phase[part] for part in MEASURED] for phase in self.phases.values()],
            dtype=torch.float64,
        )
        return compared(list(self.phases), gathered(mine.to(device.current().here())).cpu())

    def _efficiency(self, metrics: Metrics) -> Metrics:
        devices = dist.get_world_size()
        found: Metrics = {}
        for name, phase in self.phases.items():
            if flops := phase.get("flops"):
                found[f"tflops_{name}"] = flops / phase["seconds"] / devices / 1e12
                if self.peak_tflops:
                    found[f"mfu_{name}"] = found[f"tflops_{name}"] / self.peak_tflops
        if (update := self.phases.get("update")) and update.get("slots"):
            found["tokens_per_second_update"] = update["tokens"] / update["seconds"] / devices
            found["padding"] = 1 - update["computed"] / update["slots"]
            found["shared_tokens"] = 1 - update["computed"] / max(update["tokens"], 1)
            slowest = update.get("slowest", 0.0)
            found["data_parallel_idle"] = 1 - update["balanced"] / slowest if slowest else 0.0
            found["pipeline_bubble"] = update["bubble"] / update["ideal"]
        if "generated_tokens" in metrics:
            found["tokens_per_second_rollout"] = (
                metrics["generated_tokens"] / self.phases["rollout"]["seconds"] / devices
            )
        return found


def compared(phases: list[str], everybodys: Tensor) -> Metrics:
    """Returns metrics that compare the processes in each phase of a step: the mean, the lower
    median and the maximum of the working time (seconds), the rank with the maximum, and the largest
    memory (MiB); for the phase "update" also the mean pipeline idle share.

    `phases`: the phases' names; `everybodys`: the measurements of all processes, [ranks, phases,
    MEASURED].
    """
    found: Metrics = {}
    for name, (work, mib, idle) in zip(phases, everybodys.permute(1, 2, 0), strict=True):
        found[f"work_{name}"], found[f"work_{name}_max"] = work.mean().item(), work.max().item()
        found[f"work_{name}_median"], found[f"work_{name}_slowest"] = (
            work.median().item(),
            float(work.argmax()),
        )
        found[f"memory_mib_{name}"] = mib.max().item()
        if name == "update":
            found["pipeline_idle"] = idle.mean().item()
    return found
