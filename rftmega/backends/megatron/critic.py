"""MegatronCritic: a value model in a parallel layout of its own."""

from rftmega.backends.megatron.manager import MegatronModelManager
from rftmega.backends.megatron.model_runner import MegatronRunner
from rftmega.backends.megatron.trainable import MegatronModel
from rftmega.config import RunConfig
from rftmega.core.types import Column, Rows, TokenValues
from rftmega.runtime.parallel.topology import Topology


class MegatronCritic(MegatronModel):
    """MegatronCritic computes a value per token.

    Every process calls its methods with the whole batch and gets the whole result.
    """

    def __init__(
        self,
        cfg: RunConfig,
        placement: Topology,
        role: str = "critic",
        base: MegatronModelManager | None = None,
    ):
        """Builds the model of `cfg.model` with a value head, from a reward model's folder or a
        policy's (value head at 0).

        `role`: "critic", or "reward" for a model that only scores (no optimizer). `base`: a policy
        whose frozen weights this model shares, see `MegatronModelManager`.
        """
        if role not in ("critic", "reward"):
            raise ValueError(
                f"role={role!r} is unknown. Choose critic or reward; a policy is a MegatronActor."
            )
        manager = MegatronModelManager(cfg, placement, value_model=True, base=base)
        super().__init__(manager, placement)
        if role == "critic":
            self.prepare_to_learn()
        else:
            self.sum_of_frozen = manager.sum_of_weights()
        self.runner = MegatronRunner(self.manager, TokenValues, None)

    def values(self, rows: Rows[Column]) -> Column:
        """Returns the value of the state in which each target is chosen, on the host, without
        gradient.
        """
        found: Column = self.runner.score(rows).value
        return found
