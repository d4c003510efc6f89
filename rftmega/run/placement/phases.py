"""DevicePhases assigns the device's memory to policy, value models and engine in turn."""

from collections.abc import Mapping

from rftmega.core.types import Metrics
from rftmega.rollout.engines.base import Engine
from rftmega.run.placement.phase_memory import Memory, Predicted
from rftmega.runtime import device
from rftmega.runtime.device.residency import PARAMETERS, PARTS, Residency
from rftmega.runtime.parallel.watchdog import mark

POLICY = "policy"


class DevicePhases:
    """DevicePhases assigns the device's memory, phase by phase, to trained models, to the engine,
    or to the weights of both. A phase (start, rollout, score, update, push) begins with a call of
    the method with its name.
    """

    def __init__(
        self,
        models: Mapping[str, Residency],
        *,
        offload: bool,
        engine: Engine | None = None,
        predicted: Predicted | None = None,
    ):
        """`models`: name -> the model's movable state; one is "policy". Without `offload`, models
        always stay on the device. `engine` may be set later, when it has started; it stays None if
        the engine has separate devices. `predicted`: phase -> kind -> bytes, reported with the
        measured bytes.
        """
        self.models = models
        self.engine = engine
        self.offload = offload
        self._updating: str | None = None
        self.memory = Memory(models, predicted or {})

    def start(self) -> None:
        """Frees memory before the engine starts: vLLM refuses to start if less memory is free than
        it is configured to use.
        """
        self._hold("start")
        device.current().release_unused()

    def rollout(self) -> None:
        """Frees device memory for the engine, which wakes by itself."""
        self._hold("rollout")

    def score(self, model: str = POLICY) -> None:
        """Moves a model's weights to the device; optimizer state stays where it is."""
        self._engine_sleeps()
        self._hold("score", model, PARAMETERS)

    def update(self, model: str = POLICY) -> None:
        """Moves a model and its optimizer state to the device for training.

        Consecutive calls for one model, one per mini-batch, move it only once.
        """
        self._engine_sleeps()
        if self._updating != model:
            self._hold("update", model, *PARTS)
            self._updating = model

    def push(self) -> None:
        """Moves the policy's weights to the device for a push to the engine."""
        self._hold("push", POLICY, PARAMETERS)

    def pushed(self, buffer_bytes: int) -> Metrics:
        """Ends the push phase, whose send and receive buffers took `buffer_bytes`. Returns the
        memory metrics since the last call.
        """
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
            for other in self.models.keys() - {model}:  # frees memory before the next
                self.models[other].only(but=needed)
            self.models[model].only(*parts)
        self.memory.begin(phase if model == POLICY else f"{phase}_{model}")
