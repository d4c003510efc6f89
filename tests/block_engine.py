"""An engine's rank without the engine: its loader takes from every tensor what vLLM's would, and
keeps it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class BlockEngine:
    """Loads as vLLM's rank `rank` of `ranks` does: blocks of heads, rows, columns and the padded
    vocabulary.
    """

    def __init__(self, rank: int, ranks: int, *, kv_heads: int = 2):
        self.rank, self.ranks, self.kv_heads = rank, ranks, kv_heads
        self.version: int | None = None
        self.destinations = None
        self.loaded: dict[str, Tensor] = {}

    def block(self, name: str, tensor: Tensor) -> Tensor:
        kind = name.split(".")[-2]
        if kind in ("o_proj", "down_proj", "w2"):
            return tensor.chunk(self.ranks, dim=1)[self.rank]
        if kind in ("embed_tokens", "lm_head"):
            block = -(-tensor.shape[0] // 64) * 64 // self.ranks
            return tensor[self.rank * block : (self.rank + 1) * block]
        if kind in ("k_proj", "v_proj") and self.ranks > self.kv_heads:  # a head on several ranks
            return tensor.chunk(self.kv_heads)[self.rank * self.kv_heads // self.ranks]
        if kind in ("w1", "w3") or (kind.endswith("_proj") and kind[0] in "qkvgu"):
            return tensor.narrow(
                0, self.rank * tensor.shape[0] // self.ranks, tensor.shape[0] // self.ranks
            )
        return tensor

    def trace_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.load_weights(named_tensors, version=-1)
        self.invalidate()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.invalidate()
        for name, tensor in named_tensors:
            block = self.block(name, tensor)
            self.loaded[name] = torch.full(block.shape, torch.nan, dtype=tensor.dtype).copy_(block)
        self.version = version

    def invalidate(self) -> None:
        self.version = None
