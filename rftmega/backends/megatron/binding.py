"""Assigns every parameter of the built Megatron modules its conversion rule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from rftmega.converters import Rule, shard_shape
from rftmega.converters.shards import logical_tensor, shard_parts
from rftmega.core.errors import WeightMismatch
from rftmega.core.shards import Shard
from rftmega.runtime.parallel.topology import Topology


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound is a parameter (or persistent buffer) of this process together with its conversion
    rule.
    """

    rule: Rule
    layer: int | None  # global; None outside the layers
    expert: int | None  # global; None outside the experts
    parameter: Tensor
    rank: int  # index of this shard of the tensor
    ranks: int

    def shard(self) -> Shard:
        """Returns the parameter as a shard: the tensor with the blocks of Hugging Face tensors that
        it holds.
        """
        logical = logical_tensor(self.rule, self.layer, self.expert, self.parameter.dtype)
        return Shard(logical, shard_parts(self.rule, self.rank, self.ranks), self.parameter)

    @property
    def hf_names(self) -> tuple[str, ...]:
        return self.rule.hf_names(self.layer, self.expert)


def bind(
    chunks: Sequence[Module], rules: Sequence[Rule], topology: Topology, *, experts: int = 0
) -> list[Bound]:
    """Returns one Bound for each parameter of `chunks`, in the order of the conversion rules within
    each layer.

    `chunks`: this process's unwrapped pipeline chunks. `experts`: the number of experts of the
    whole model. Raises WeightMismatch for a parameter without a rule, for a layer's rule without a
    parameter, and for a parameter of another shape than its rule says.
    """
    return [
        bound
        for chunk in chunks
        for bound in _bind_chunk(chunk, rules, topology, experts // topology.expert)
    ]


def _bind_chunk(
    chunk: Any, rules: Sequence[Rule], topology: Topology, experts: int
) -> Iterator[Bound]:
    left = {
        name: tensor
        for name, tensor in chunk.state_dict(keep_vars=True).items()
        if not name.endswith("._extra_state")
    }  # including buffers, such as a router's bias
    for rule in rules:
        shard = (
            (topology.expert_tensor_rank, topology.expert_tensor)
            if rule.per_expert
            else (topology.tensor_rank, topology.tensor)
        )
        if not rule.per_layer:
            yield from (
                _bound(rule, None, None, left.pop(name), *shard)
                for name in rule.megatron
                if name in left
            )
            continue
        for local, module in enumerate(chunk.decoder.layers):
            # Megatron numbers modules from 0 in every chunk; layer_number is global and starts at
            # 1.
            layer = module.layer_number - 1
            if not rule.speaks_of(layer):
                continue
            for number in range(experts) if rule.per_expert else [None]:
                names = [name.format(layer=local, expert=number) for name in rule.megatron]
                present = [name for name in names if name in left]
                if len(present) != 1:
                    raise WeightMismatch(
                        f"The model has {present or 'no parameter'} where the table expects one of: {' or '.join(names)}."
                    )
                expert = None if number is None else topology.expert_rank * experts + number
                yield _bound(rule, layer, expert, left.pop(present[0]), *shard)
    if left:
        raise WeightMismatch(f"No rule of the conversion table covers {sorted(left)}.")


def _bound(
    rule: Rule, layer: int | None, expert: int | None, tensor: Tensor, rank: int, ranks: int
) -> Bound:
    if tensor.shape == shard_shape(rule, 0, 1):
        # every rank has all of it, like Transformer Engine's low-rank layers of latent attention
        rank, ranks = 0, 1
    if tensor.shape != (wanted := shard_shape(rule, rank, ranks)):
        raise WeightMismatch(
            f"{rule.megatron[0]} is {tuple(tensor.shape)} in the model, {tuple(wanted)} by the table."
        )
    return Bound(rule, layer, expert, tensor, rank, ranks)
