"""FSDPBackend builds the models of a run on torch's FSDP2."""

from rftmega.backends.fsdp.actor import FSDPActor
from rftmega.backends.fsdp.critic import FSDPCritic
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.config import RunConfig


class FSDPBackend:
    """FSDPBackend is the `strategy.backend.Backend` that shards any decoder of transformers."""

    def policy(self, config: RunConfig) -> FSDPActor:
        return FSDPActor(config, ShardingMesh.create(config.parallel))

    def value_model(self, config: RunConfig, *, role: str) -> FSDPCritic:
        """Builds a critic or a reward model, over replicas of its own."""
        return FSDPCritic(config, ShardingMesh.create(config.parallel), learns=role == "critic")
