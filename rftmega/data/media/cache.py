"""TensorCache keeps recently used tensors that were computed from files."""

from collections import OrderedDict

from torch import Tensor

MOST = 256 * 2**20  # bytes of cached tensors


class TensorCache:
    """TensorCache holds tensors by the digests of their files, up to MOST bytes in total; it evicts
    the least recently used tensor.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def __getitem__(self, digest: str) -> Tensor:
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def keep(self, digest: str, tensor: Tensor) -> None:
        self._kept[digest] = tensor
        self._bytes += tensor.nbytes
        while self._bytes > MOST and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
