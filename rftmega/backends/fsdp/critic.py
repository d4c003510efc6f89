"""FSDPCritic: a value model with sharded parameters."""

from rftmega.backends.fsdp.manager import FSDPModelManager
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.runner import FSDPRunner
from rftmega.backends.fsdp.trainable import FSDPModel
from rftmega.config import RunConfig
from rftmega.core.types import Column, Rows, TokenValues


class FSDPCritic(FSDPModel):
    """FSDPCritic computes a value per token.

    Every process calls its methods with the whole batch and gets the whole result.
    """

    def __init__(self, cfg: RunConfig, placement: ShardingMesh, *, learns: bool):
        """Builds the model of `cfg.model` with a value head, from the folder of a reward model, or
        of a policy (its value head is zero at first).
        `learns`: the model is trained, instead of only scoring.
        """
        super().__init__(FSDPModelManager(cfg, placement, value_model=True), placement)
        if learns:
            self.manager.setup_model_and_optimizer()
        else:
            self.sum_of_frozen = self.manager.sum_of_weights()
        self.runner = FSDPRunner(self.manager, TokenValues)

    def values(self, rows: Rows[Column]) -> Column:
        """Returns the value of the state in which each target token is chosen, on the host, without
        gradient; `rows` are token sequences of prompt and completion.
        """
        found: Column = self.runner.score(rows).value
        return found
