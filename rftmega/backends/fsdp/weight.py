"""Weight is what a process holds of one parameter, in every precision that it is needed in."""

from dataclasses import dataclass

from torch import Tensor

from rftmega.backends.decoder.parameter_places import ShardPlan
from rftmega.backends.decoder.tensor_plan import Split
from rftmega.core.shards import Shard


@dataclass(slots=True)
class Weight:
    """Weight is this process's rows of a parameter, or of its share of one."""

    name: str  # as transformers has it
    parameter: Tensor  # sharded
    plans: list[ShardPlan]  # which HF tensors the rows hold
    embeds: bool  # it is the embedding
    split: Split | None  # among the processes of a tensor-parallel group; None: each has it whole
    partial: bool  # it is whole, and each has a share of its gradient
    rows: Tensor  # float32, what the optimizer steps; of a frozen one: `pushed` itself
    pushed: Tensor  # in the dtype of the forward pass; float32: `rows` itself

    @property
    def learns(self) -> bool:
        return self.parameter.requires_grad

    def shards(self) -> list[Shard]:
        """Returns the rows in the dtype of the forward pass."""
        return [plan.of(self.pushed) for plan in self.plans]
