"""An engine's rank whose loader puts blocks beside each other in fewer parameters, as vLLM's layers
have them.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.block_engine import BlockEngine

FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "w13",
    "up_proj": "w13",
    "w1": "w13",
    "w3": "w13",
}


class FusedEngine(BlockEngine):
    """q, k and v, gate and up are one parameter each, and a layer's experts one of three
    dimensions. It is its own destinations.

    `after` is what the loader does to a parameter besides copying to it.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        shapes: Mapping[str, Iterable[int]],
        *,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(rank, ranks)
        self.destinations: Any = self
        self.dtype = dtype
        self.after: Callable[[str, Tensor], None] = lambda name, parameter: None
        self.parameters: dict[str, Tensor] = {}
        self.by_loader: set[str] = set()  # HF tensors that the last load handed over
        self._rows: dict[tuple[str, int], int] = {}
        # parameter, expert, first and last row
        self._places: dict[str, tuple[str, int, int, int]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._watched: tuple[Collection[str], Callable[[str, Tensor], None]] = (
            (),
            lambda name, parameter: None,
        )
        for name, shape in shapes.items():
            found = re.search(r"experts\.(\d+)\.", name)
            expert = int(found[1]) if found else -1
            kind = name.split(".")[-2]
            fused = re.sub(r"experts\.\d+", "experts", name).replace(
                f"{kind}.", f"{FUSED.get(kind, kind)}."
            )
            block = tuple(self.block(name, torch.empty(tuple(shape), device="meta")).shape)
            begin = self._rows.get((fused, expert), 0)
            self._rows[fused, expert] = begin + block[0]
            self._places[name] = fused, expert, begin, begin + block[0]
            whole = (begin + block[0], *block[1:])
            self._shapes[fused] = (
                whole if expert < 0 else (max(expert + 1, self._shapes.get(fused, (0,))[0]), *whole)
            )

    def _target(self, name: str) -> Tensor:
        fused, expert, begin, end = self._places[name]
        whole = self.parameters[fused]
        return (whole if expert < 0 else whole[expert]).narrow(0, begin, end - begin)

    def fresh(self) -> dict[str, Tensor]:
        """What a load fills."""
        return {
            name: torch.full(shape, torch.nan, dtype=self.dtype)
            for name, shape in self._shapes.items()
        }

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.invalidate()
        self.by_loader, self._watched = set(), ((), lambda name, parameter: None)
        self.parameters = self.fresh()
        for name, tensor in named_tensors:
            self._target(name).copy_(self.block(name, tensor))
            self.after(name, self._target(name))
            self.by_loader.add(name)
        for parameter in self._watched[0]:
            self._watched[1](parameter, self.parameters[parameter])
        self.version = version

    def bare(self) -> dict[str, Tensor]:
        self.parameters = {name: tensor.to("meta") for name, tensor in self.parameters.items()}
        return self.parameters

    def watch(self, names: Collection[str], filled: Callable[[str, Tensor], None]) -> None:
        self._watched = names, filled

    def fill(self, name: str, filling: Any) -> None:
        filling.into(self.parameters[name].to("meta"))
        filling.into(self.parameters[name])
