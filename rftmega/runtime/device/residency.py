"""Residency moves the parts of a model between device and host.

A part is a list of tensors. Moving a part to the host frees the *storage* under its tensors and
leaves the tensor objects, so that aliases of a tensor (Megatron's parameter and gradient buffers,
shards of a distributed optimizer, the optimizer's own lists) stay valid for every kind of
optimizer.
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
    """Packed is a frozen weight that is kept in a compressed form on the host."""

    @property
    def weight(self) -> Tensor: ...

    def unpack(self) -> None:
        """Fills the weight, which is on the device, with its decompressed values."""

    def unpacked(self) -> Tensor:
        """Returns the decompressed values of the weight, on the host."""


@dataclass(slots=True)
class Berth:
    """Berth describes where the content of one tensor storage is (device, host or both), and holds
    its host buffer, which is kept for the next time that the storage is moved.
    """

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
    """Loan describes tensors that belong to another model, the lender, and that this model computes
    with, too; only the lender moves them to the host.
    """

    lender: "Residency"
    tensors: Sequence[Tensor]


class Residency:
    """Residency tracks which parts of a model (see PARTS: parameters, gradients, main parameters,
    Adam states) are on the device, and moves them to and from the host.

    Moving a part to where it is already does nothing. A part that was moved to the host and back is
    copied again only after a change: code that writes into the model's tensors without autograd
    noticing (an optimizer, a load) calls `changed`.
    """

    def __init__(
        self,
        parts: Callable[[], dict[str, list[Tensor]]],
        finish: Callable[[], None] = lambda: None,
        loan: Loan | None = None,
    ):
        """Stores the functions that list and complete the model's tensors.

        `parts` returns part -> its current tensors: Adam has none before its first step. `finish`
        completes the parameters if the optimizer postponed gathering some of them; it is called
        before they are read. `loan`: parameters borrowed from another model, in none of the parts;
        they are loaded to the device with this model's parameters, and only their lender offloads
        them.
        """
        self._parts = parts
        self._loan = loan
        self.finish = finish
        self._berths: dict[int, Berth] = {}  # by the storage's id
        self._replaced = False
        self._aside: Any = None  # a copy to the host that may still run

    @property
    def borrowed(self) -> Sequence[Tensor]:
        """Returns the tensors of another model that this model computes with; empty without a loan."""
        return () if self._loan is None else self._loan.tensors

    def off(self, *parts: str, keep: bool = True, but: Iterable[Tensor] = ()) -> None:
        """Moves the named parts to the host, except the tensors in `but`, which stay on the device.

        With `keep=False` the parts' content is dropped; they return to the device as zeros.
        """
        self.finish()
        storages, stays = self.storages(), storages_of(but)
        going = {number: storage for part in parts for number, storage in storages[part].items()}
        self._off([going[number] for number in going if number not in stays], keep=keep)

    def on(self, *parts: str) -> None:
        """Moves the named parts back to the device, with the contents that they had, bit for bit;
        dropped contents become zeros.
        """
        storages = self.storages()
        self._on(number for part in parts for number in storages[part])
        if self._loan is not None and PARAMETERS in parts:
            self._loan.lender.on_tensors(self._loan.tensors)

    def only(self, *parts: str, but: Iterable[Tensor] = ()) -> None:
        """Moves the named parts to the device and all other parts off the device, except the
        tensors in `but`, which stay.
        If gradients are not among the named parts, they are dropped instead of copied to the host.
        """
        # Off before on: the device need not hold both.
        leaving = (part for part in PARTS if part not in parts and part != GRADIENTS)
        self.off(*leaving, but=but)
        if GRADIENTS not in parts:
            self.off(GRADIENTS, keep=False)
        device.current().release_unused()
        self.on(*parts)

    def changed(self) -> None:
        """Marks the host copies of all tensors on the device as stale; to be called after a write
        to model tensors that autograd does not see.
        """
        for berth in self._berths.values():
            if not berth.away:
                berth.current = False

    def bytes(self) -> dict[str, int]:
        """Returns the number of bytes that each part occupies on the device."""
        return {
            part: sum(s.nbytes() for s in storages.values())
            for part, storages in self.storages().items()
        }

    def keep_packed(self, weights: Iterable[Packed]) -> None:
        """Registers frozen weights that have a compressed copy on the host: when such a weight
        returns to the device, it is decompressed from this copy instead of copied from an exact
        one.

        Each weight must have a separate storage.
        """
        for packed in weights:
            self._berth(packed.weight.untyped_storage()).packed = packed

    def off_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Moves the given tensors of the model to the host, whichever part they belong to."""
        self._off(list(storages_of(tensors).values()), keep=True)

    def on_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Moves the given tensors of the model back to the device, whichever part they belong to."""
        self._on(storages_of(tensors))

    @contextmanager
    def brought(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Keeps the given tensors of the model on the device within a `with` block; tensors that
        were on the host return there afterwards.
        """
        away = [tensor for tensor in tensors if not tensor.untyped_storage().nbytes()]
        self.on_tensors(away)
        try:
            yield
        finally:
            self.off_tensors(away)

    def host(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` if it is on the device, otherwise the same view of its host copy.

        The result shares memory with the model: copy it before the model changes.
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
        """Replaces the contents of model tensors by those of host tensors within a `with` block,
        and restores them afterwards, bit for bit.

        `theirs`: pairs of a model tensor on the device and the host tensor to copy into it. The
        model's own contents are kept in host copies; an up-to-date host copy is not made again.
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
        """Starts copying tensors of the model to the host while the device computes, and returns a
        function that waits until the copy is complete.

        `pairs`: (model tensor, host tensor). Call `settle` before the model tensors are changed.
        """
        self.settle()
        self._aside = device.current().copy_aside(list(pairs))
        return self._aside.wait

    def settle(self) -> None:
        """Makes the device finish the copy that `copy_aside` started, if any, before it does
        further work; the host does not wait.
        """
        if self._aside is not None:
            self._aside.hold()
            self._aside = None

    def storages(self) -> dict[str, dict[int, Any]]:
        """Returns part -> storage id -> storage of the model's current tensors.

        A storage that two parts share (e.g. the fp32 main parameters of an fp32 model are its
        parameters) is listed under the first of these parts.
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
        """Copies the contents of the storages that `berths` describe to their host buffers, unless
        the host copy is up to date.
        """
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
        """Allocates one host buffer for all storages that `berths` describe, since pinning each
        buffer separately costs a driver call.
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
        """Returns storage id -> sum of the autograd version counters of the model's tensors on this
        storage: the sum grows whenever autograd sees a write to one of them.
        """
        found: Counter[int] = Counter()
        for tensors in self._parts().values():
            for tensor in tensors:
                found[tensor.untyped_storage()._cdata] += tensor._version
        return found


def storages_of(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Returns storage id -> storage for the distinct storages under `tensors`; the id stays the
    same while the storage's memory is freed.
    """
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
