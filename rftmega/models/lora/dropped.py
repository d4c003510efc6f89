"""Applies adapter dropout, with the same random choice on all processes that share a layer."""

from torch import Tensor
from torch.nn import functional


def dropped(x: Tensor, share: float, *, width: int, columns: slice | None) -> Tensor:
    """Applies dropout with probability `share` to x [..., width] or, if `columns` is given, to x as
    these columns of a tensor [..., width], of which each process has other columns.
    """
    if columns is None:
        return functional.dropout(x, share)
    # drawn for all columns, so that the processes that share the layer draw alike
    kept = functional.dropout(x.new_ones(*x.shape[:-1], width), share)
    return x * kept[..., columns]
