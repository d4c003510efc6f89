"""What a model keeps on the device, part by part, and moving each to the host and back.

A part is a list of tensors. Moving frees the *storage* under them and leaves the tensors alone, so that whatever aliases it
(Megatron's parameter and gradient buffers, shards of a distributed optimizer, the optimizer's own lists) stays right for
every kind of optimizer.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rftmega import device

PARAMETERS, GRADIENTS, MAIN_PARAMETERS, ADAM = PARTS = ("parameters", "gradients", "main_parameters", "adam")


class Residency:
    """Which parts of a model are on the device. Moving a part that is already there does nothing."""

    def __init__(self, parts: Callable[[], dict[str, list[Tensor]]]):
        """`parts` lists the tensors of each part as they are now: Adam has none before its first step."""
        self._parts = parts
        self._home: dict[int, tuple[Any, Tensor]] = {}  # storage's id -> (the freed storage, its bytes on the host)
        self._buffers: dict[int, Tensor] = {}  # host buffers, kept for the next time

    def off(self, *parts: str, keep: bool = True) -> None:
        """Moves parts to the host; with `keep=False` their content is forgotten and comes back as zeros."""
        self.off_tensors((t for part in parts for t in self._tensors()[part]), keep=keep)

    def on(self, *parts: str) -> None:
        """Brings parts back, bit for bit."""
        self.on_tensors(t for part in parts for t in self._tensors()[part])

    def only(self, *parts: str) -> None:
        """Exactly these parts are on the device afterwards. Gradients are forgotten rather than moved."""
        # First off, then on: the device need not hold both.
        self.off(*(part for part in PARTS if part not in parts and part != GRADIENTS))
        if GRADIENTS not in parts:
            self.off(GRADIENTS, keep=False)
        device.current().release_unused()
        self.on(*parts)

    def bytes(self) -> dict[str, int]:
        """Bytes on the device, by part."""
        return {part: sum(s.nbytes() for s in _storages(tensors)) for part, tensors in self._tensors().items()}

    def off_tensors(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """The same for any tensors of the model."""
        leaving = [storage for storage in _storages(tensors) if storage.nbytes()]
        for storage in leaving:
            size = storage.nbytes()
            home = self._buffers.get(storage._cdata)
            if home is None or home.numel() != size:
                home = self._buffers[storage._cdata] = device.current().host_buffer(size, torch.uint8)
            if keep:
                home.copy_(_bytes_of(storage), non_blocking=True)
            else:
                home.zero_()
            self._home[storage._cdata] = storage, home
        device.current().synchronize()  # the copies must be done before the memory is given to others
        for storage in leaving:
            storage.resize_(0)

    def on_tensors(self, tensors: Iterable[Tensor]) -> None:
        """The same for any tensors of the model."""
        for storage in _storages(tensors):
            if (away := self._home.pop(storage._cdata, None)) is not None:
                storage.resize_(away[1].numel())
                _bytes_of(storage).copy_(away[1], non_blocking=True)
        device.current().synchronize()

    def _tensors(self) -> dict[str, list[Tensor]]:
        """Each part's tensors; a storage that two parts share (fp32 main parameters that are the parameters) is the first's."""
        seen: set[int] = set()
        found = {}
        for part, tensors in self._parts().items():
            found[part] = [t for t in tensors if t.untyped_storage()._cdata not in seen]
            seen |= {t.untyped_storage()._cdata for t in tensors}
        return found


def parts_of(model: Iterable[Any], optimizer: Any) -> dict[str, list[Tensor]]:
    """The parts of a wrapped (or bare) model and its optimizer; None where there is no optimizer."""
    chunks = list(model)
    wrapped = [chunk for chunk in chunks if hasattr(chunk, "expert_parallel_buffers")]
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        PARAMETERS: [p.data for chunk in chunks for p in chunk.parameters()],
        GRADIENTS: [buffer.grad_data for buffer in buffers],
        MAIN_PARAMETERS: list(main_parameters(optimizer)),
        ADAM: [x for inner in inner_optimizers(optimizer) for state in _adam(inner) for x in state],
    }


def inner_optimizers(optimizers: Any) -> list[Any]:
    """Megatron's optimizers inside a chain, a list, or alone."""
    if optimizers is None:
        return []
    if isinstance(optimizers, list | tuple):
        return [inner for optimizer in optimizers for inner in inner_optimizers(optimizer)]
    return list(getattr(optimizers, "chained_optimizers", [optimizers]))


def main_parameters(optimizers: Any) -> Iterator[Tensor]:
    """The fp32 copies of half-precision parameters, of any kind of Megatron optimizer; an fp32 one has none."""
    for inner in inner_optimizers(optimizers):
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(inner, name, ()):
                yield from (p.data for p in group if p is not None)


def _adam(inner: Any) -> Iterator[list[Tensor]]:
    if inner.optimizer is None:  # a process without trainable parameters
        return
    for state in inner.optimizer.state.values():
        yield [x for x in state.values() if isinstance(x, Tensor) and x.dim() > 0]  # the step count is a host number


def _storages(tensors: Iterable[Tensor]) -> list[Any]:
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
