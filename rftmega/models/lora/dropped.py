"""Applies adapter dropout, alike on the processes that share a layer."""

from torch import Tensor
from torch.nn import functional


def dropped(x: Tensor, share: float, *, width: int, columns: slice | None) -> Tensor:
    """Drops a share of the elements of x [..., width], or of x as the `columns` of such a
    tensor.
    """
    if columns is None:
        return functional.dropout(x, share)
    # drawn for all columns, so that the processes that share the layer draw alike
    kept = functional.dropout(x.new_ones(*x.shape[:-1], width), share)
    return x * kept[..., columns]
