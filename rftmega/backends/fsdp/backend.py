"""FSDPBackend builds the models of a run with FSDP2."""

from rftmega.backends.fsdp.actor import FSDPActor
from rftmega.backends.fsdp.critic import FSDPCritic
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.config import RunConfig


class FSDPBackend:
    """FSDPBackend is the `run.placement.backend.Backend` that trains any transformers decoder with
    FSDP2.
    """

    def policy(self, config: RunConfig) -> FSDPActor:
        return FSDPActor(config, ShardingMesh.create(config.parallel))

    def teacher(self, config: RunConfig) -> FSDPActor:
        """Builds the model of `config` without an optimizer, in its own layout."""
        return FSDPActor(config, ShardingMesh.create(config.parallel), learns=False)

    def value_model(self, config: RunConfig, *, role: str) -> FSDPCritic:
        """Builds a critic or a reward model, with its own sharding mesh.

        `role`: "critic" for a model that is trained; with any other role, such as "reward", the
        model only scores.
        """
        return FSDPCritic(config, ShardingMesh.create(config.parallel), learns=role == "critic")
