"""A colocated run's policy, value models and weight transfer take the device before they compute."""

from collections.abc import Callable

from torch import Tensor

from rftmega.device.spans import recorder
from rftmega.interfaces import WeightSync
from rftmega.megatron import MegatronActor, MegatronCritic
from rftmega.megatron.model_runner import at_once
from rftmega.strategy.phases import DevicePhases
from rftmega.types import (
    Auxiliary,
    EachStep,
    Experience,
    LossFn,
    Metrics,
    Rows,
    SliceChecksums,
    TokenStats,
    Told,
)

COUNT = "count of "
COUNTS = ("tokens", "slots", "flops", "bubble", "ideal")


def _with_counts(each: EachStep) -> EachStep:
    """What an optimizer step counts travels with its metrics: one that was done before a resume is counted after it."""

    def each_with_counts(step: Callable[[], Metrics]) -> Metrics:
        done_now = False

        def counting() -> Metrics:
            nonlocal done_now
            done_now, before = True, {name: recorder.counted(name) for name in COUNTS}
            metrics = step()
            return metrics | {COUNT + name: recorder.counted(name) - before[name] for name in COUNTS}

        metrics = each(counting)
        if not done_now:
            for name in COUNTS:
                recorder.count(name, metrics[COUNT + name])
        return {name: value for name, value in metrics.items() if not name.startswith(COUNT)}

    return each_with_counts


class ColocatedPolicy:
    """The policy of a colocated run: what it needs comes to the device before it computes."""

    def __init__(self, actor: MegatronActor, phases: DevicePhases):
        self.actor = actor
        self.phases = phases

    def log_probs(self, rows: Rows, *, temperature: float | None = None) -> TokenStats:
        self.phases.score()
        return self.actor.log_probs(rows, temperature=temperature)

    def reference_log_probs(self, rows: Rows) -> TokenStats:
        self.phases.score()
        return self.actor.reference_log_probs(rows)

    def update(
        self,
        experience: Experience,
        loss_fn: LossFn,
        *,
        auxiliary: Auxiliary | None = None,
        each: EachStep = at_once,
        scored: Told | None = None,
    ) -> Metrics:
        self.phases.update()
        return self.actor.update(experience, loss_fn, auxiliary=auxiliary, each=_with_counts(each), scored=scored)


class ColocatedValues:
    """A value model likewise, under the `name` that Turns knows it by."""

    def __init__(self, model: MegatronCritic, phases: DevicePhases, name: str):
        self.model, self.phases, self.name = model, phases, name

    def values(self, rows: Rows) -> Tensor:
        self.phases.score(self.name)
        return self.model.values(rows)

    def update(self, experience: Experience, loss_fn: LossFn, *, each: EachStep = at_once) -> Metrics:
        self.phases.update(self.name)
        return self.model.update(experience, loss_fn, each=_with_counts(each))


class ColocatedWeights:
    """The weight transfer of a colocated run."""

    def __init__(self, weights: WeightSync, phases: DevicePhases):
        self.weights = weights
        self.phases = phases

    def push(self, *, version: int) -> Metrics:
        self.phases.push()
        metrics = self.weights.push(version=version)
        self.phases.memory.end(push_buffers=int(metrics["push_buffer_bytes"]))
        return metrics | self.phases.memory.take()

    def checksums(self) -> list[SliceChecksums]:
        self.phases.push()
        return self.weights.checksums()
