"""Drops elements of what an adapter is given, alike on processes that share a layer."""

from torch import Tensor
from torch.nn import functional


def dropped(x: Tensor, share: float, *, width: int, columns: slice | None) -> Tensor:
    """Drops a share of the elements of x [..., width], or of those of its `columns` that are x."""
    if columns is None:
        return functional.dropout(x, share)
    # all columns are drawn for, so that the processes that share the layer draw alike
    kept = functional.dropout(x.new_ones(*x.shape[:-1], width), share)
    return x * kept[..., columns]
