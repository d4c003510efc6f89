"""TowerModel: a Megatron decoder with a transformers vision or audio encoder (the tower) on its
first pipeline stage.
The tower is replicated over tensor- and context-parallel processes. The gradient of its output is
complete on every tensor-parallel process, so it is not reduced over them; under context parallelism
it covers this process's tokens only, and Megatron's data-parallel reduction, which includes the
context-parallel processes, sums it.
"""

from typing import Any, ClassVar

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from rftmega.model_providers.training_mode import allow_recomputation, learn


class TowerModel(GPTModel):
    """TowerModel is one pipeline chunk of a vision- or audio-language model; the first chunk
    contains the vision or audio encoder (the tower), under the attribute name `place`.
    """

    place: ClassVar[str]

    def __init__(self, *args: Any, tower: nn.Module | None, frozen: bool, **named: Any):
        """Builds the chunk with the given `tower`, which is None except in the first chunk; a
        `frozen` tower is not trained. The other arguments are GPTModel's.
        """
        super().__init__(*args, scatter_embedding_sequence_parallel=False, **named)
        self.frozen = frozen
        if tower is not None:
            setattr(self, self.place, tower.requires_grad_(not frozen))
            if self.config.recompute_granularity == "full" and not frozen:
                allow_recomputation(tower)

    def train(self, mode: bool = True) -> "TowerModel":
        """Switches the chunk to training or to scoring; the tower never applies dropout."""
        super().train(mode)
        if isinstance(tower := getattr(self, self.place, None), nn.Module):
            learn(tower, mode)
        return self

    def _scattered(self, hidden: Tensor) -> Tensor:
        """Returns this process's part of `hidden` [N, 1, H] along the sequence under sequence
        parallelism, otherwise `hidden` unchanged.
        """
        if not self.config.sequence_parallel:
            return hidden
        scattered: Tensor = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
        return scattered

    def _nothing(self) -> Tensor:
        """Returns 0, computed from all parameters of the vision or audio encoder so that each
        parameter gets a gradient.
        A data-parallel reduction that overlaps the backward pass waits until every parameter has a
        gradient.
        """
        tower: nn.Module = getattr(self, self.place)
        firsts = [parameter.flatten()[:1] for parameter in tower.parameters()]
        return 0.0 * torch.cat(firsts).sum()
