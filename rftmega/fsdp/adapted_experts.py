"""Adapters on a mixture's experts, which transformers keeps in one tensor a layer.

The layer's own forward pass takes each expert's matrix out of that tensor and multiplies tokens with
it. While it runs, a stand-in is in the tensor's place, whose products have those of the expert's pairs
added: no sum of a matrix and its product is ever held, and frozen experts have no gradient.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rftmega.config import LoRA
from rftmega.errors import ConfigError
from rftmega.fsdp.dropped import dropped
from rftmega.fsdp.weight import Weight
from rftmega.hf_folders.adapted_layers import module_name, pair_of
from rftmega.hf_folders.parameter_places import Placed
from rftmega.hf_folders.tensor_plan import Split
from rftmega.shards import Box, shape_of

BESIDE = "lora"  # the name of the module of pairs within that of the experts


class PairsOfExperts(nn.Module):
    """PairsOfExperts holds a pair for each expert of a layer, beside one of its matrices."""

    def __init__(self, experts: int, rows: int, columns: int, options: LoRA):
        """The pairs are on the meta device."""
        super().__init__()
        with torch.device("meta"):
            self.lora_A = nn.Parameter(torch.empty(experts, options.rank, columns))
            self.lora_B = nn.Parameter(torch.empty(experts, rows, options.rank))
        self.width, self.scaling, self.dropout = columns, options.scaling, options.dropout
        self.columns: slice | None = None  # those of x that this process has; None: all

    def product(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns what an expert's pair gives for its tokens x [N, in]: [N, rows]."""
        if self.training and self.dropout:
            x = dropped(x, self.dropout, width=self.width, columns=self.columns)
        return self.scaling * functional.linear(functional.linear(x, a), b)


class MatrixWithPairs:
    """MatrixWithPairs stands in for an expert's matrix, as the weight of a linear layer alone."""

    def __init__(self, weight: Tensor, products: Sequence[Callable[[Tensor], Tensor] | None]):
        """`products`: of what stands in the matrix, one below the other; None: it has no pair."""
        self.weight, self.products = weight, products

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Sequence[Any] = (), named: Any = None
    ) -> Tensor:
        if function is not functional.linear or len(given) < 2 or not isinstance(given[1], cls):
            raise TypeError(
                f"The forward pass of this model's experts calls {function} with their weights, and adapters on experts know "
                "torch.nn.functional.linear alone. Leave experts out of model.lora.targets, or take backend=megatron."
            )
        x, matrix, *bias = given
        answer = functional.linear(x, matrix.weight, *bias, **(named or {}))
        return answer + matrix._sums(x)

    def _sums(self, x: Tensor) -> Tensor:
        rows = len(self.weight) // len(self.products)
        nothing = x.new_zeros(*x.shape[:-1], rows)
        return torch.cat([nothing if of is None else of(x) for of in self.products], dim=-1)


class StackWithPairs:
    """StackWithPairs stands in for the tensor of a layer's experts [E, rows, columns]."""

    def __init__(self, stack: Tensor, parts: Sequence[PairsOfExperts | None]):
        self.stack, self.parts = stack, parts
        # taken apart once, so that a backward pass puts each gradient together once
        self.pairs = [
            None if part is None else (part.lora_A.unbind(), part.lora_B.unbind()) for part in parts
        ]

    def __getitem__(self, expert: int | Tensor) -> MatrixWithPairs:
        products = [self._product(number, int(expert)) for number in range(len(self.parts))]
        return MatrixWithPairs(self.stack[expert], products)

    def _product(self, number: int, expert: int) -> Callable[[Tensor], Tensor] | None:
        part, pairs = self.parts[number], self.pairs[number]
        if part is None or pairs is None:
            return None
        a, b = pairs[0][expert], pairs[1][expert]
        return lambda x: part.product(x, a, b)


@dataclass(frozen=True, slots=True)
class StackDelta:
    """StackDelta is what pairs add to the matrix of one expert: a `shards.Addend`."""

    pairs: Sequence[tuple[Tensor, Tensor] | None]  # A and B of what stands below each other
    rows: int  # of each
    scaling: float

    @torch.no_grad()
    def of(self, box: Box) -> Tensor:
        (start, stop), columns = box
        number = start // self.rows
        first = number * self.rows
        assert stop <= first + self.rows, f"{box} has rows of two matrices"
        pair = self.pairs[number]
        if pair is None:
            return torch.zeros(shape_of(box))
        down, up = pair[0][:, slice(*columns)], pair[1][start - first : stop - first]
        return self.scaling * (up.float() @ down.float())


class AdaptedStack:
    """AdaptedStack is a layer's experts in one tensor, with pairs beside its matrices."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        parts: Sequence[str],
        found: Container[str],
        lora: LoRA,
    ):
        """`name`: of the parameter. `parts`: what stands in each expert's matrix, one below the
        other, such as gate_proj and up_proj; those that are `found` among them get pairs.
        """
        above, _, self.leaf = name.rpartition(".")
        self.above, self.parts, self.scaling = above, parts, lora.scaling
        self.experts: Any = model.get_submodule(above)
        number, rows, columns = self.experts.get_parameter(self.leaf).shape
        self.pairs = {
            part: PairsOfExperts(number, rows // len(parts), columns, lora)
            for part in parts
            if part in found
        }
        if not hasattr(self.experts, BESIDE):
            self.experts.add_module(BESIDE, nn.ModuleDict())
        getattr(self.experts, BESIDE).update(self.pairs)
        self.off = False
        self.experts.forward = self._with_stand_in(self.experts.forward)
        self._bound: dict[str, tuple[Weight, Weight]] = {}

    def _with_stand_in(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def adapted(*given: Any, **named: Any) -> Tensor:
            if self.off:
                return forward(*given, **named)
            stack = getattr(self.experts, self.leaf)
            # an attribute of the module's own comes before its parameters
            vars(self.experts)[self.leaf] = StackWithPairs(
                stack, [self.pairs.get(part) for part in self.parts]
            )
            try:
                return forward(*given, **named)
            finally:
                del vars(self.experts)[self.leaf]

        return adapted

    def matrices(self) -> Iterator[Tensor]:
        """Yields A and B of each pair, of all experts."""
        for pairs in self.pairs.values():
            yield from (pairs.lora_A, pairs.lora_B)

    def names(self, above: str = "") -> dict[str, tuple[str, str]]:
        """Returns the names of the parameters A and B by the part that they are beside, within
        experts of the name `above`; "": transformers'.
        """
        inside = f"{above or self.above}.{BESIDE}"
        return {part: (f"{inside}.{part}.lora_A", f"{inside}.{part}.lora_B") for part in self.pairs}

    def places(self, places: Sequence[Placed]) -> dict[str, list[Placed]]:
        """Returns where the pairs' tensors lie in their parameters, by the folder's `places` of the
        experts.

        Raises ConfigError where the folder has all experts in one tensor.
        """
        found: dict[str, list[Placed]] = {}
        for place in places:
            if place.expert is None:
                raise ConfigError(
                    f"model.lora.targets: {place.name} is all experts in one tensor of the folder, so their adapters have no "
                    "names. Leave experts out of the targets, or take a folder that has each by itself."
                )
            part = module_name(place.name)
            if part in self.pairs:
                both = (self.pairs[part].lora_A, self.pairs[part].lora_B)
                named = zip(self.names()[part], pair_of(place.name), both, strict=True)
                for known, hf_name, matrix in named:
                    shape = tuple(matrix.shape[1:])
                    found.setdefault(known, []).append(Placed(hf_name, shape, place.expert, (0, 0)))
        return found

    def share(self, split: Split, splits: dict[str, Split], partial: set[str]) -> None:
        """Adds to `splits` and `partial` how tensor-parallel processes share the pairs, by how they
        share the experts: see `ShardedAdapters.share`.
        """
        for part, (down, up) in self.names().items():
            pairs = self.pairs[part]
            if split.dim == 1:
                rows = pairs.lora_B.shape[1]
                splits[up] = Split(1, _within(split, self.parts.index(part) * rows, rows))
                partial.add(down)
            else:
                splits[down] = split
                pairs.columns = slice(*split.slices[0])
                partial.add(up)

    def bind(self, known: Mapping[str, Weight]) -> Iterator[Weight]:
        """Finds the pairs among the weights of a process, and yields them."""
        for part, (down, up) in self.names().items():
            self._bound[part] = known[down], known[up]
            yield from self._bound[part]

    def delta(self, index: int, rows: int) -> StackDelta:
        """Returns what is added to a matrix of so many rows: of the `index`-th expert of this
        process, which has that one's pairs as well.
        """
        pairs: list[tuple[Tensor, Tensor] | None] = []
        for part in self.parts:
            held = self._bound.get(part)
            pairs.append(held and (held[0].pushed[index], held[1].pushed[index]))
        return StackDelta(pairs, rows // len(self.parts), self.scaling)


def _within(split: Split, first: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Returns the slices of a split that lie in `rows` from the `first` on, as seen from there."""
    own = [(max(start - first, 0), min(stop - first, rows)) for start, stop in split.slices]
    return tuple((start, stop) for start, stop in own if start < stop)
