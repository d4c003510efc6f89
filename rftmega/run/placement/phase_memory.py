"""Measures the memory of each phase of a run, and reports it together with the predicted memory."""

from collections import Counter
from collections.abc import Mapping

from rftmega.config import RunConfig
from rftmega.config.capabilities import backend_of
from rftmega.core.types import Metrics
from rftmega.model_providers.optional_cuda_packages import uses_transformer_engine
from rftmega.run.planning.memory import resident
from rftmega.run.planning.models import GRADIENTS, POLICY, models_of
from rftmega.run.planning.push_buffers import push_buffers
from rftmega.runtime import device
from rftmega.runtime.device import heap
from rftmega.runtime.device.residency import Residency
from rftmega.runtime.parallel.layout import place_of
from rftmega.runtime.parallel.process_group import World

MIB = 2**20
Predicted = Mapping[str, Mapping[str, int]]  # phase -> kind -> bytes


def predicted(config: RunConfig, world: World) -> Predicted:
    """Predicts with `rftmega.run.planning` how many bytes of each kind this process holds at the end
    of each phase. Returns phase -> kind -> bytes.
    """
    auto = str(device.current().train_dtype).removeprefix("torch.")
    models = models_of(config, auto=auto, narrow_whole=uses_transformer_engine())
    stages = {
        name: place_of(world.rank, world.size, planned.parallel).stage
        for name, planned in models.items()
    }
    phases = resident(models, config, world.size, stages)
    if not backend_of(config).layouts:  # gradients are freed before a phase ends
        return {phase: parts | {GRADIENTS: 0} for phase, parts in phases.items()}
    if "push" in phases:
        phases["push"] = phases["push"] | {
            "push_buffers": push_buffers(models[POLICY], config, world.size)[world.rank]
        }
    return phases


class Memory:
    """Memory measures the memory of this process at the end of each phase of a run, in MiB.

    Metrics are memory_<phase>_<kind>_mib (live tensors of a kind such as gradients),
    memory_<phase>_<kind>_mib_predicted, and memory_<phase>_<name>_mib (values of the device's
    `memory`). If a phase runs several times before `take`, its maximum is reported.
    """

    def __init__(self, models: Mapping[str, Residency], predicted: Predicted):
        self.models, self.predicted = models, predicted
        self._metrics: Metrics = {}
        self._phase: str | None = None

    def begin(self, phase: str) -> None:
        self._phase = phase
        device.current().forget_peak()

    def end(self, **more: int) -> None:
        """Measures the memory at the end of the phase that `begin` has named, then returns freed
        memory of the heap to the system; has no effect if no phase has begun.

        `more`: kind -> bytes of memory that the models do not count, such as push_buffers.
        """
        if self._phase is None:
            return
        measured: Counter[str] = Counter(more)
        for held in self.models.values():
            measured.update(held.bytes())
        predicted = self.predicted.get(self._phase, {})
        for kind in measured.keys() | predicted.keys():
            if measured[kind] or predicted.get(kind, 0):
                self._keep(kind, measured[kind])
            if kind in predicted and (measured[kind] or predicted[kind]):
                foretold = predicted[kind] / MIB
                self._metrics[f"memory_{self._phase}_{kind}_mib_predicted"] = foretold
        for name, size in device.current().memory().items():
            self._keep(name, size)
        self._phase = None
        heap.trim()

    def take(self) -> Metrics:
        """Returns the metrics measured since the last call."""
        found, self._metrics = self._metrics, {}
        return found

    def _keep(self, what: str, size: int) -> None:
        name = f"memory_{self._phase}_{what}_mib"
        self._metrics[name] = max(self._metrics.get(name, 0.0), size / MIB)
