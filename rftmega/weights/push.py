"""WeightSync: the policy's weights into the engine of this process."""

from rftmega.interfaces import RolloutEngine
from rftmega.types import Metrics
from rftmega.weights.gather import Exporter


class EngineWeights:
    """Pushes whole tensors, bucket by bucket, through the engine's own loader."""

    def __init__(self, exporter: Exporter, engine: RolloutEngine):
        self.exporter = exporter
        self.engine = engine

    def push(self, *, version: int) -> Metrics:
        """Every process calls it; afterwards its engine answers under `version`."""
        tensors = iter(self.exporter)
        self.engine.load_weights(tensors, version=version)
        for _ in tensors:  # an engine that stopped early must not leave the other processes waiting in a collective
            pass
        return {"push_bytes": float(self.exporter.total_bytes)}
