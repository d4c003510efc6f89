"""Which rule speaks of which parameter: decided by looking at the modules that Megatron really built."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, Parameter

from converters import Rule
from rftmega.errors import WeightMismatch


@dataclass(frozen=True, slots=True)
class Bound:
    """One parameter of this process and the rule that converts it; `layer` is global, None outside the layers."""

    rule: Rule
    layer: int | None
    parameter: Parameter

    @property
    def hf_names(self) -> tuple[str, ...]:
        return self.rule.hf_names(self.layer)


def bind(chunks: Sequence[Module], rules: Sequence[Rule]) -> list[Bound]:
    """One Bound a parameter of `chunks`, in the table's order within each layer.

    Raises WeightMismatch for a parameter without a rule, and for a rule of a layer without its parameter.
    """
    return [bound for chunk in chunks for bound in _bind_chunk(chunk, rules)]


def _bind_chunk(chunk: Any, rules: Sequence[Rule]) -> Iterator[Bound]:
    left = dict(chunk.named_parameters())
    for rule in rules:
        # Megatron numbers modules from 0 in every chunk; layer_number is global and starts at 1.
        layers = enumerate(chunk.decoder.layers) if rule.per_layer else [(None, None)]
        for local, layer in layers:
            present = [name for n in rule.megatron if (name := n.format(layer=local)) in left]
            if rule.per_layer and len(present) != 1:
                wanted = " or ".join(n.format(layer=local) for n in rule.megatron)
                raise WeightMismatch(f"The model has {present or 'no parameter'} where the table expects one of: {wanted}.")
            for name in present:
                yield Bound(rule, None if layer is None else layer.layer_number - 1, left.pop(name))
    if left:
        raise WeightMismatch(f"No rule of the conversion table covers {sorted(left)}.")
