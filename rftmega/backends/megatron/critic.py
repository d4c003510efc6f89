"""MegatronCritic: a value model with its own parallel layout."""

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
        """Builds the model of `cfg.model` with a value head, from the folder of a reward model, or
        of a policy (its value head is zero at first).
        `role`: "critic", or "reward" for a model that only scores (no optimizer). `base`: the model
        manager of a policy whose frozen weights this model shares, see `MegatronModelManager`.
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
        """Returns the value of the state in which each target token is chosen, on the host, without
        gradient; `rows` are token sequences of prompt and completion.
        """
        found: Column = self.runner.score(rows).value
        return found
