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

    def __init__(self, rank: int, ranks: int, *, heads: int = 4, kv_heads: int = 2):
        self.rank, self.ranks, self.heads, self.kv_heads = rank, ranks, heads, kv_heads
        self.version: int | None = None
        self.destinations = None
        self.loaded: dict[str, Tensor] = {}

    def block(self, name: str, tensor: Tensor) -> Tensor:
        """Returns what this rank keeps of a tensor, as a view; of a fused one, its blocks of all parts
        in a tensor of their own.
        """
        first, *others = self.blocks(name, tensor)
        return torch.cat([first, *others]) if others else first

    def blocks(self, name: str, tensor: Tensor) -> list[Tensor]:
        kind = name.split(".")[-2]
        if kind not in ("qkv_proj", "gate_up_proj"):
            return [self._block(kind, tensor)]
        shares = (self.heads, self.kv_heads, self.kv_heads) if kind == "qkv_proj" else (1, 1)
        rows = [tensor.shape[0] * share // sum(shares) for share in shares]
        kinds = ("q_proj", "k_proj", "v_proj") if kind == "qkv_proj" else ("gate_proj", "up_proj")
        starts = [sum(rows[:number]) for number in range(len(rows))]
        parts = (tensor.narrow(0, start, row) for start, row in zip(starts, rows, strict=True))
        return [self._block(each, part) for each, part in zip(kinds, parts, strict=True)]

    def _block(self, kind: str, tensor: Tensor) -> Tensor:
        if kind in ("o_proj", "down_proj", "w2") and tensor.dim() == 1:  # a bias
            return tensor
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
            blocks = self.blocks(name, tensor)
            if len(blocks) == 1:
                blocks = [self.block(name, tensor)]
            rows = [len(block) for block in blocks]
            shape = (sum(rows), *blocks[0].shape[1:])
            found = torch.full(shape, torch.nan, dtype=tensor.dtype)
            for place, block in zip(found.split(rows), blocks, strict=True):
                place.copy_(block)
            self.loaded[name] = found
        self.version = version

    def invalidate(self) -> None:
        self.version = None
