"""LoRA adapters on the fused experts of transformers models: creates them, and finds their names,
positions and tensor-parallel splits.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rftmega.backends.decoder.adapted_layers import module_name, pair_of
from rftmega.backends.decoder.parameter_places import Placed
from rftmega.backends.decoder.tensor_plan import Split
from rftmega.backends.fsdp.parameter_rows import Weight
from rftmega.config import LoRA
from rftmega.core.errors import ConfigError
from rftmega.models.lora.experts import PairsOfExperts, StackDelta, StackWithPairs

BESIDE = "lora"  # submodule of the experts that holds the pairs


class AdaptedStack:
    """AdaptedStack adds LoRA pairs to the matrices of a layer's fused experts."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        parts: Sequence[str],
        found: Container[str],
        lora: LoRA,
    ):
        """Adds LoRA pairs to the experts.

        `name`: of the fused parameter. `parts`: names of the matrices stacked by rows in each
        expert, such as gate_proj and up_proj; those in `found` get pairs.
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
            # a module's own attributes take precedence over its parameters
            vars(self.experts)[self.leaf] = StackWithPairs(
                stack, [self.pairs.get(part) for part in self.parts]
            )
            try:
                return forward(*given, **named)
            finally:
                del vars(self.experts)[self.leaf]

        return adapted

    def train(self, learning: bool) -> None:
        """Switches the pairs to training (`learning`), where dropout may apply, or to scoring."""
        for pairs in self.pairs.values():
            pairs.training = learning

    def matrices(self) -> Iterator[Tensor]:
        """Yields the matrices A and B of each pair, stacked over all experts."""
        for pairs in self.pairs.values():
            yield from (pairs.lora_A, pairs.lora_B)

    def names(self, above: str = "") -> dict[str, tuple[str, str]]:
        """Returns matrix name -> parameter names of its A and B.

        `above`: name of the experts module that the names begin with; by default transformers'
        name.
        """
        inside = f"{above or self.above}.{BESIDE}"
        return {part: (f"{inside}.{part}.lora_A", f"{inside}.{part}.lora_B") for part in self.pairs}

    def places(self, places: Sequence[Placed]) -> dict[str, list[Placed]]:
        """Returns the positions of the pairs' Hugging Face tensors in their parameters, derived
        from the positions `places` of the experts' tensors.
        Raises ConfigError if the folder stores all experts in one tensor.
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
        """Adds the tensor-parallel splits of the LoRA matrices to `splits` (parameter name ->
        Split), and the names of those that every process holds in full to `partial`.

        `split` is the split of the fused experts. See `ShardedAdapters.share`.
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
        """Stores and yields this process's Weights of the LoRA matrices; `known` maps parameter
        names to the Weights of the model.
        """
        for part, (down, up) in self.names().items():
            self._bound[part] = known[down], known[up]
            yield from self._bound[part]

    def delta(self, index: int, rows: int) -> StackDelta:
        """Returns the delta that the adapters add to one expert's fused matrix, which has `rows`
        rows.

        `index`: index of the expert among the experts whose fused matrices this process holds; it
        holds the LoRA matrices of the same experts, in the same order.
        """
        pairs: list[tuple[Tensor, Tensor] | None] = []
        for part in self.parts:
            held = self._bound.get(part)
            pairs.append(held and (held[0].pushed[index], held[1].pushed[index]))
        return StackDelta(pairs, rows // len(self.parts), self.scaling)


def _within(split: Split, first: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Returns the parts of the index ranges in `split` that lie within the `rows` rows from row
    `first` on, relative to `first`.
    """
    own = [(max(start - first, 0), min(stop - first, rows)) for start, stop in split.slices]
    return tuple((start, stop) for start, stop in own if start < stop)
