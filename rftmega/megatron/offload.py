"""What a model keeps on the device, part by part, and moving each to the host and back.

A part is a list of tensors. Moving frees the *storage* under them and leaves the tensors alone, so that whatever aliases it
(Megatron's parameter and gradient buffers, shards of a distributed optimizer, the optimizer's own lists) stays right for
every kind of optimizer.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rftmega import device
from rftmega.device.spans import spanned

PARAMETERS, GRADIENTS, MAIN_PARAMETERS, ADAM = PARTS = ("parameters", "gradients", "main_parameters", "adam")


@dataclass(slots=True)
class Berth:
    """A storage's place on the host, kept for the next time."""

    storage: Any
    content: Tensor  # [bytes] view of the storage; valid whenever it is on the device
    home: Tensor  # [bytes] on the host
    away: bool = False  # freed, and its content at home


class Residency:
    """Which parts of a model are on the device. Moving a part that is already there does nothing."""

    def __init__(self, parts: Callable[[], dict[str, list[Tensor]]]):
        """`parts` lists the tensors of each part as they are now: Adam has none before its first step."""
        self._parts = parts
        self._berths: dict[int, Berth] = {}  # by the storage's id

    def off(self, *parts: str, keep: bool = True) -> None:
        """Moves parts to the host; with `keep=False` their content is forgotten and comes back as zeros."""
        storages = self.storages()
        self._off((storage for part in parts for storage in storages[part].values()), keep=keep)

    def on(self, *parts: str) -> None:
        """Brings parts back, bit for bit."""
        storages = self.storages()
        self._on(number for part in parts for number in storages[part])

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
        return {part: sum(s.nbytes() for s in storages.values()) for part, storages in self.storages().items()}

    def off_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Moves any tensors of the model."""
        self._off(storages_of(tensors).values(), keep=True)

    def on_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Brings them back."""
        self._on(storages_of(tensors))

    def host(self, tensor: Tensor) -> Tensor:
        """`tensor`, wherever it is: itself, or the same view of what lies on the host. Live either way, so copy it."""
        berth = self._berths.get(tensor.untyped_storage()._cdata)
        if berth is None or not berth.away:
            return tensor
        return berth.home.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def storages(self) -> dict[str, dict[int, Any]]:
        """Each part's storages; one that two parts share (fp32 main parameters that are the parameters) is the first's."""
        seen: set[int] = set()
        found = {}
        for part, tensors in self._parts().items():
            found[part] = {number: storage for number, storage in storages_of(tensors).items() if number not in seen}
            seen |= found[part].keys()
        return found

    @spanned("offload")
    def _off(self, storages: Iterable[Any], *, keep: bool) -> None:
        leaving = []
        for storage in storages:
            if not storage.nbytes():
                continue
            berth = self._berths.get(storage._cdata)
            if berth is None or len(berth.home) != storage.nbytes():
                content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                home = device.current().host_buffer(storage.nbytes(), torch.uint8)
                berth = self._berths[storage._cdata] = Berth(storage, content, home)
            if keep:
                berth.home.copy_(berth.content, non_blocking=True)
            else:
                berth.home.zero_()
            leaving.append(berth)
        device.current().synchronize()  # the copies must be done before the memory is given to others
        for berth in leaving:
            berth.storage.resize_(0)
            berth.away = True

    @spanned("onload")
    def _on(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            berth = self._berths.get(number)
            if berth is not None and berth.away:
                berth.storage.resize_(len(berth.home))
                berth.content.copy_(berth.home, non_blocking=True)
                berth.away = False
        device.current().synchronize()


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


def storages_of(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """The memory under `tensors`, each once, by an id that stays the same while it is freed."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
