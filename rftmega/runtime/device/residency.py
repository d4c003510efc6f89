"""Residency moves the parts of a model between device and host.

A part is a list of tensors. Moving frees the *storage* under them and leaves the tensors alone, so
that its aliases (Megatron's parameter and gradient buffers, shards of a distributed optimizer, the
optimizer's own lists) stay valid for every kind of optimizer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rftmega.runtime import device
from rftmega.runtime.device.spans import spanned

PARAMETERS, GRADIENTS, MAIN_PARAMETERS, ADAM = PARTS = (
    "parameters",
    "gradients",
    "main_parameters",
    "adam",
)
ALIGNMENT = 256  # bytes: homes of several storages share a buffer


class Packed(Protocol):
    """Packed is a frozen weight in another form on the host."""

    @property
    def weight(self) -> Tensor: ...

    def unpack(self) -> None:
        """Fills the weight, which is on the device."""

    def unpacked(self) -> Tensor:
        """Returns the content of the weight, on the host."""


@dataclass(slots=True)
class Berth:
    """Berth is a storage's place on the host, kept for the next time."""

    storage: Any
    content: Tensor  # [bytes] view of the storage; valid whenever it is on the device
    size: int  # bytes
    # [bytes] on the host, from the first time that the content is kept
    home: Tensor | None = None
    packed: Packed | None = None  # on the host, instead of a home
    away: bool = False  # freed on the device
    current: bool = False  # `home` equals the storage, or did when it was freed
    stamp: int = 0  # of the tensors' versions when `home` was last current


@dataclass(frozen=True, slots=True)
class Loan:
    """Loan is tensors of another model that a model computes with; only the lender moves them."""

    lender: "Residency"
    tensors: Sequence[Tensor]


class Residency:
    """Residency tracks which parts of a model are on the device, and moves them; moving one that is
    there does nothing.

    A part that was moved to the host and back is copied again only after it changed: code that
    writes into the model's tensors past autograd (an optimizer, a load) calls `changed`.
    """

    def __init__(
        self,
        parts: Callable[[], dict[str, list[Tensor]]],
        finish: Callable[[], None] = lambda: None,
        loan: Loan | None = None,
    ):
        """Takes the functions that list and complete the model's tensors.

        `parts` lists the current tensors of each part: Adam has none before its first step.
        `finish` completes the parameters if the optimizer left some of them to be gathered later;
        it is called before they are read. `loan`: parameters that are in none of the parts; they
        are loaded with the others, and only their lender offloads them.
        """
        self._parts = parts
        self._loan = loan
        self.finish = finish
        self._berths: dict[int, Berth] = {}  # by the storage's id
        self._replaced = False
        self._aside: Any = None  # a copy to the host that may still run

    @property
    def borrowed(self) -> Sequence[Tensor]:
        """Returns the tensors of another model that this model's parameters compute with."""
        return () if self._loan is None else self._loan.tensors

    def off(self, *parts: str, keep: bool = True, but: Iterable[Tensor] = ()) -> None:
        """Moves parts to the host, except the tensors of `but`.

        With `keep=False` their content is dropped and comes back as zeros.
        """
        self.finish()
        storages, stays = self.storages(), storages_of(but)
        going = {number: storage for part in parts for number, storage in storages[part].items()}
        self._off([going[number] for number in going if number not in stays], keep=keep)

    def on(self, *parts: str) -> None:
        """Moves parts back to the device, bit for bit."""
        storages = self.storages()
        self._on(number for part in parts for number in storages[part])
        if self._loan is not None and PARAMETERS in parts:
            self._loan.lender.on_tensors(self._loan.tensors)

    def only(self, *parts: str, but: Iterable[Tensor] = ()) -> None:
        """Moves exactly these parts to the device and all others off it, except the tensors of
        `but`.

        Gradients are dropped instead of moved.
        """
        # Off before on: the device need not hold both.
        leaving = (part for part in PARTS if part not in parts and part != GRADIENTS)
        self.off(*leaving, but=but)
        if GRADIENTS not in parts:
            self.off(GRADIENTS, keep=False)
        device.current().release_unused()
        self.on(*parts)

    def changed(self) -> None:
        """Marks host copies of tensors on the device as stale; called after a write to these
        tensors.
        """
        for berth in self._berths.values():
            if not berth.away:
                berth.current = False

    def bytes(self) -> dict[str, int]:
        """Returns the bytes on the device by part."""
        return {
            part: sum(s.nbytes() for s in storages.values())
            for part, storages in self.storages().items()
        }

    def keep_packed(self, weights: Iterable[Packed]) -> None:
        """Registers packed weights, from which they are restored; each has a storage of its own."""
        for packed in weights:
            self._berth(packed.weight.untyped_storage()).packed = packed

    def off_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Moves any tensors of the model to the host."""
        self._off(list(storages_of(tensors).values()), keep=True)

    def on_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Moves any tensors of the model back to the device."""
        self._on(storages_of(tensors))

    @contextmanager
    def brought(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Moves any tensors of the model to the device within a `with` block; those that were on
        the host return there.
        """
        away = [tensor for tensor in tensors if not tensor.untyped_storage().nbytes()]
        self.on_tensors(away)
        try:
            yield
        finally:
            self.off_tensors(away)

    def host(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` if it is on the device, otherwise the same view of its host copy.

        Live either way, so copy it.
        """
        berth = self._berths.get(tensor.untyped_storage()._cdata)
        if berth is None or not berth.away:
            return tensor
        if berth.packed is not None:
            return berth.packed.unpacked()
        assert berth.home is not None and berth.current, (
            "this tensor was forgotten when its memory was freed"
        )
        home = berth.home.view(tensor.dtype)
        return home.as_strided(
            tensor.shape, tensor.stride(), home.storage_offset() + tensor.storage_offset()
        )

    @contextmanager
    def replaced(self, theirs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Replaces the contents of model tensors on the device by those of host tensors within a
        `with` block: pairs of both.

        Afterwards they have their own again, bit for bit, from the host; contents that are there
        already are not copied to it.
        """
        pairs = list(theirs)
        self.finish()
        self.settle()
        berths = [
            self._berth(storage) for storage in storages_of(mine for mine, _ in pairs).values()
        ]
        self._bring_home(berths)
        with torch.no_grad():
            for mine, other in pairs:
                # in place: gradient and parameter buffers alias this storage
                mine.copy_(other, non_blocking=True)
        self._replaced = True
        try:
            yield
        finally:
            self._replaced = False
            self._fetch(berths)
            stamps = self._stamps()
            for berth in berths:
                berth.stamp = stamps[berth.storage._cdata]

    def copy_aside(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copies tensors of the model to the host while the device computes (pairs of both), and
        returns a function that waits for the end.

        Call `settle` before the tensors are changed.
        """
        self.settle()
        self._aside = device.current().copy_aside(list(pairs))
        return self._aside.wait

    def settle(self) -> None:
        """Makes the device wait for a copy aside before its next work.

        The host does not wait.
        """
        if self._aside is not None:
            self._aside.hold()
            self._aside = None

    def storages(self) -> dict[str, dict[int, Any]]:
        """Returns each part's storages.

        A storage that two parts share (fp32 main parameters that are the parameters) belongs to the
        first.
        """
        seen: set[int] = set()
        found = {}
        for part, tensors in self._parts().items():
            found[part] = {
                number: storage
                for number, storage in storages_of(tensors).items()
                if number not in seen
            }
            seen |= found[part].keys()
        return found

    @spanned("offload")
    def _off(self, storages: list[Any], *, keep: bool) -> None:
        assert not self._replaced, (
            "the model holds weights of another for the moment: its own would be lost"
        )
        leaving = [self._berth(storage) for storage in storages if storage.nbytes()]
        if keep:
            self._bring_home(leaving)
        # the copies must be done before the memory is given to others
        device.current().synchronize()
        for berth in leaving:
            berth.storage.resize_(0)
            berth.away = True
            berth.current = berth.current and keep

    @spanned("onload")
    def _on(self, numbers: Iterable[int]) -> None:
        berths = [self._berths[number] for number in numbers if number in self._berths]
        coming = [berth for berth in berths if berth.away]
        for berth in coming:
            berth.storage.resize_(berth.size)
            berth.away = False
        self._fetch([berth for berth in coming if berth.current])
        for berth in coming:
            if not berth.current:  # it was dropped
                berth.content.zero_()
        device.current().synchronize()

    def _berth(self, storage: Any) -> Berth:
        berth = self._berths.get(storage._cdata)
        if berth is None or berth.size != storage.nbytes():
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            berth = self._berths[storage._cdata] = Berth(storage, content, storage.nbytes())
        return berth

    def _bring_home(self, berths: list[Berth]) -> None:
        """Copies contents to the host, unless an up-to-date copy is there."""
        self._house([berth for berth in berths if berth.home is None and berth.packed is None])
        stamps = self._stamps()
        for berth in berths:
            stamp = stamps[berth.storage._cdata]
            if berth.packed is not None:
                berth.current = True
                continue
            if berth.current and berth.stamp == stamp:
                continue
            assert berth.home is not None
            berth.home.copy_(berth.content, non_blocking=True)
            berth.current, berth.stamp = True, stamp

    def _fetch(self, berths: Iterable[Berth]) -> None:
        for berth in berths:
            if berth.packed is not None:
                berth.packed.unpack()
                continue
            assert berth.home is not None
            berth.content.copy_(berth.home, non_blocking=True)

    def _house(self, berths: list[Berth]) -> None:
        """Allocates one host buffer for all of the berths: pinning a buffer costs a call of the
        driver.
        """
        ends = []
        end = 0
        for berth in berths:
            end += -(-berth.size // ALIGNMENT) * ALIGNMENT
            ends.append(end)
        if not berths:
            return
        buffer = device.current().host_buffer(end, torch.uint8)
        for berth, start in zip(berths, [0, *ends], strict=False):
            berth.home = buffer[start : start + berth.size]

    def _stamps(self) -> Counter[int]:
        """Returns a number per storage that grows whenever autograd sees a write to one of its
        tensors.
        """
        found: Counter[int] = Counter()
        for tensors in self._parts().values():
            for tensor in tensors:
                found[tensor.untyped_storage()._cdata] += tensor._version
        return found


def storages_of(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Returns the storages under `tensors`, each once, by an id that stays the same while its
    memory is freed.
    """
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
