"""MegatronBackend builds the models of a run on Megatron-Core."""

from rftmega.backends.megatron.actor import MegatronActor
from rftmega.backends.megatron.critic import MegatronCritic
from rftmega.config import RunConfig
from rftmega.runtime.parallel.topology import Topology


class MegatronBackend:
    """MegatronBackend is the `run.placement.backend.Backend` on Megatron-Core, for any parallel layout."""

    def __init__(self) -> None:
        self._policy: MegatronActor | None = None

    def policy(self, config: RunConfig) -> MegatronActor:
        self._policy = MegatronActor(config, _topology(config))
        return self._policy

    def teacher(self, config: RunConfig) -> MegatronActor:
        """Builds the model of `config` without an optimizer, in its own layout."""
        found = MegatronActor(config, _topology(config), role="reference")
        found.sum_of_frozen = found.manager.sum_of_weights()
        return found

    def value_model(self, config: RunConfig, *, role: str) -> MegatronCritic:
        """Builds a critic in its own layout, or a reward model in the policy's layout (`role`:
        "critic" or "reward").
        A critic with adapters that has the policy's folder and layout shares the policy's frozen
        weights.
        """
        policy = self._policy
        if role == "reward" and policy is not None:
            return MegatronCritic(config, policy.topology, role=role)
        base = None if policy is None else policy.manager.lends_to(config)
        return MegatronCritic(config, _topology(config), role=role, base=base)


def _topology(config: RunConfig) -> Topology:
    return Topology.create(config.parallel, seed=config.trainer.seed)
