"""Weight holds a process's rows of one parameter, in the optimizer's and the forward pass's dtype,
or all of a buffer that belongs to the model's state.
"""

from dataclasses import dataclass

from torch import Tensor

from rftmega.backends.decoder.parameter_places import ShardPlan
from rftmega.backends.decoder.tensor_plan import Split
from rftmega.core.shards import Shard


@dataclass(slots=True)
class Weight:
    """Weight holds this process's rows of a parameter, or of its tensor-parallel share of the
    parameter.
    """

    name: str  # transformers' name
    parameter: Tensor  # sharded
    plans: list[ShardPlan]  # the HF tensors in the rows
    embeds: bool  # whether it is the embedding
    split: Split | None  # tensor-parallel split; None: replicated
    partial: bool  # replicated, with partial gradients
    rows: Tensor  # float32, stepped by the optimizer; of a frozen one: `pushed` itself
    pushed: Tensor  # in the forward pass's dtype; float32: `rows` itself
    whole: bool = False  # a buffer, of which every process holds all elements in its own dtype

    @property
    def learns(self) -> bool:
        return self.parameter.requires_grad

    @property
    def names(self) -> list[str]:
        """Returns the names of the Hugging Face tensors in this process's rows."""
        return [name for plan in self.plans for name in plan.logical.names]

    def shards(self) -> list[Shard]:
        """Returns this process's rows in the forward pass's dtype as shards: tensors with the
        blocks of Hugging Face tensors that they hold.
        """
        return [plan.of(self.pushed) for plan in self.plans]
