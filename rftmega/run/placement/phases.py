"""DevicePhases gives the device's memory to policy, value models and engine in turn."""

from collections.abc import Mapping

from rftmega.core.types import Metrics
from rftmega.rollout.engines.base import Engine
from rftmega.run.placement.phase_memory import Memory, Predicted
from rftmega.runtime import device
from rftmega.runtime.device.residency import PARAMETERS, PARTS, Residency
from rftmega.runtime.parallel.watchdog import mark

POLICY = "policy"


class DevicePhases:
    """DevicePhases gives the device's memory to the trainer's parts, to the engine, or to the
    weights of both, phase by phase.
    """

    def __init__(
        self,
        models: Mapping[str, Residency],
        *,
        offload: bool,
        engine: Engine | None = None,
        predicted: Predicted | None = None,
    ):
        """`models` by name, "policy" among them. Without `offload` they keep everything, always.
        `engine` may be set once it has started; None: it has devices of its own. `predicted` bytes
        are told beside those that are measured.
        """
        self.models = models
        self.engine = engine
        self.offload = offload
        self._updating: str | None = None
        self.memory = Memory(models, predicted or {})

    def start(self) -> None:
        """Makes room for the engine to start: vLLM refuses to where less memory is free than it is
        to have.
        """
        self._hold("start")
        device.current().release_unused()

    def rollout(self) -> None:
        """Makes room for the engine to work; it wakes by itself."""
        self._hold("rollout")

    def score(self, model: str = POLICY) -> None:
        """Brings a model's weights to be read; optimizer state stays where it is."""
        self._engine_sleeps()
        self._hold("score", model, PARAMETERS)

    def update(self, model: str = POLICY) -> None:
        """Brings a model to learn.

        Calls one after another, a mini-batch each, hold the device once.
        """
        self._engine_sleeps()
        if self._updating != model:
            self._hold("update", model, *PARTS)
            self._updating = model

    def push(self) -> None:
        """Brings the weights that move from the policy to the engine."""
        self._hold("push", POLICY, PARAMETERS)

    def pushed(self, buffer_bytes: int) -> Metrics:
        """Ends the push, whose buffers took so many bytes. Returns what was measured of memory."""
        self.memory.end(push_buffers=buffer_bytes)
        return self.memory.take()

    def _engine_sleeps(self) -> None:
        if self.engine is not None:
            self.engine.sleep()

    def _hold(self, phase: str, model: str = POLICY, *parts: str) -> None:
        self._updating = None
        for held in self.models.values():
            held.finish()
        mark(phase if model == POLICY else f"{phase}_{model}")
        self.memory.end()
        if self.offload:
            needed = self.models[model].borrowed if PARAMETERS in parts else ()
            for other in self.models.keys() - {model}:  # who leaves makes room for who comes
                self.models[other].only(but=needed)
            self.models[model].only(*parts)
        self.memory.begin(phase if model == POLICY else f"{phase}_{model}")
