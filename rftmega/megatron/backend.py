"""MegatronBackend builds the models of a run on Megatron-Core."""

from rftmega.config import RunConfig
from rftmega.megatron.actor import MegatronActor
from rftmega.megatron.critic import MegatronCritic
from rftmega.parallel.topology import Topology


class MegatronBackend:
    """MegatronBackend is the `strategy.backend.Backend` that runs in any 3D-parallel layout."""

    def __init__(self) -> None:
        self._of_policy: Topology | None = None

    def policy(self, config: RunConfig) -> MegatronActor:
        self._of_policy = _topology(config)
        return MegatronActor(config, self._of_policy)

    def value_model(self, config: RunConfig, *, role: str) -> MegatronCritic:
        """Builds a critic in a layout of its own, a reward model in the policy's."""
        if role == "reward" and self._of_policy is not None:
            return MegatronCritic(config, self._of_policy, role=role)
        return MegatronCritic(config, _topology(config), role=role)


def _topology(config: RunConfig) -> Topology:
    return Topology.create(config.parallel, seed=config.trainer.seed)
