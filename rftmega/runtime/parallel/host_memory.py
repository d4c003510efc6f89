"""HostMemory keeps data that all processes of a run read, such as a rollout, once per host instead
of once per process.

Processes of one host map the same memory (`parallel.shared`); the first process of each host
exchanges the data with other hosts.
"""

import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.ragged import Ragged
from rftmega.runtime import device
from rftmega.runtime.parallel import shared
from rftmega.runtime.parallel.collectives import gather_objects

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Spec = tuple[torch.dtype, int]  # dtype and number of elements of a tensor
SMALL = 1 << 16  # bytes up to which a tensor is sent instead of shared
BUCKET = 1 << 26  # bytes sent between hosts at a time


class HostMemory:
    """HostMemory shares tensors among the processes of each host; its methods are collectives over
    all processes of the run.
    A single process gets ordinary tensors.
    """

    def __init__(self, host: str | None = None):
        """Groups the processes by host; a collective.

        `host`: name of this process's host; None: the name is detected.
        """
        self._host_group: Any = None
        self._hosts_group: Any = None  # of the first processes of all hosts
        self.hosts, self.processes, self.first, self.alone = 1, 1, True, True
        if not dist.is_initialized():
            return
        rank, self.processes = dist.get_rank(), dist.get_world_size()
        names = _tried(gather_objects(host or this_host()))
        ranks = [[i for i, name in enumerate(names) if name == own] for own in dict.fromkeys(names)]
        mine = next(own for own in ranks if rank in own)
        self.hosts, self.first, self.alone = len(ranks), rank == mine[0], len(mine) == 1
        # every process takes part in the creation of every group
        groups = [dist.new_group(own) if len(own) > 1 else None for own in ranks]
        self._host_group = groups[ranks.index(mine)]
        self._leader = mine[0]
        if self.hosts > 1:
            self._hosts_group = dist.new_group([own[0] for own in ranks])

    def once(self, make: Callable[[], Result]) -> Result:
        """Calls `make` on the first process of each host only, and returns its result on every
        process.

        The result is a tensor, a number, or nested dataclasses, dicts, lists and tuples of tensors
        and numbers, and must not be changed. If `make` raises an exception, every process of the
        host raises one.
        """
        if self.alone:
            return make()
        tensors: list[Tensor] = []
        told: list[Any] = [None]
        made = error = None
        if self.first:
            try:
                made = make()
                told = [
                    (_taken_apart(made, tensors), [(x.dtype, x.numel()) for x in tensors], None)
                ]
            except Exception as raised:
                error = raised
                told = [(None, [], f"{type(raised).__name__}: {raised}")]
        dist.broadcast_object_list(told, self._leader, group=self._host_group)
        skeleton, specs, failed = told[0]
        if error is not None:
            raise error
        if failed is not None:
            raise RuntimeError(f"The first process of this host failed: {failed}")

        def write(memory: Sequence[Tensor]) -> None:
            for target, tensor in zip(memory, tensors, strict=False):
                target.copy_(tensor.reshape(-1))

        found: Result = _put_together(skeleton, self._written(specs, write))
        return found

    def filled(
        self, specs: Sequence[Spec], write: Callable[[Sequence[Tensor]], None]
    ) -> list[Tensor]:
        """Returns 1D tensors, the same on every process, into which each process has written its
        elements.

        `specs`: (dtype, number of elements) of each tensor. `write` gets the tensors full of zeros
        and writes this process's elements; no two processes write to the same element. Small
        tensors are sent to each process instead of shared, which is faster.
        """
        if sum(size * dtype.itemsize for dtype, size in specs) <= SMALL:
            found = [torch.zeros(size, dtype=dtype) for dtype, size in specs]
            write(found)
            for tensor in found:
                if self.processes > 1:
                    _add_up(tensor.view(torch.uint8), None)
            return found
        found = self._written(specs, write)
        if self.hosts > 1:
            if self.first:
                for tensor in found:
                    _add_up(tensor.view(torch.uint8), self._hosts_group)
            self._meet()
        return found

    def gathered(self, columns: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Concatenates 1D tensors of all processes in the order of ranks.

        `columns`: this process's tensors, each with n elements; `sizes`: n of each rank. Returns
        one tensor [sum of n] for each column.
        """
        if len(sizes) == 1 or not sum(sizes):
            return list(columns)
        rank = dist.get_rank()
        start = sum(sizes[:rank])
        own = slice(start, start + sizes[rank])

        def write(memory: Sequence[Tensor]) -> None:
            for target, column in zip(memory, columns, strict=True):
                target[own] = column

        return self.filled([(column.dtype, sum(sizes)) for column in columns], write)

    def of_rows(
        self, lengths: Tensor, columns: int, own: Iterable[tuple[Tensor, Sequence[Tensor]]]
    ) -> list[Ragged]:
        """Gathers float32 values of B rows (sequences) of different lengths: each process
        contributes some rows, and gets all.

        `lengths` [B]: length of each row; `columns`: number of values per position. `own` yields
        row indices ([b] int64) with the values of each column in these rows, [b, T], on any device.
        Returns one Ragged (rows of different lengths) for each column.
        """

        def write(memory: Sequence[Tensor]) -> None:
            for index, values in own:
                for target, padded in zip(memory, values, strict=True):
                    Ragged.packed(target, lengths).select(index).assign(padded.cpu())

        found = self.filled([(torch.float32, int(lengths.sum()))] * columns, write)
        return [Ragged.packed(values, lengths) for values in found]

    def of_tokens(
        self,
        counts: Tensor,
        columns: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        own: Iterable[tuple[Tensor, Mapping[str, Tensor]]],
    ) -> dict[str, Ragged]:
        """Gathers values of any shape and dtype, `counts` [B] per row: each process contributes
        some rows, and gets all.

        `columns`: name -> (dtype, shape of an element). `own` yields row indices ([b] int64) with
        the values of each column in these rows, one row after another, [n, ...] on the host.
        """
        total = int(counts.sum())
        sizes = [(dtype, total * math.prod(shape)) for dtype, shape in columns.values()]

        def shaped(memory: Sequence[Tensor]) -> dict[str, Ragged]:
            views = zip(columns.items(), memory, strict=True)
            return {
                name: Ragged.packed(flat.view(total, *shape), counts)
                for (name, (_, shape)), flat in views
            }

        def write(memory: Sequence[Tensor]) -> None:
            targets = shaped(memory)
            for index, values in own:
                for name, target in targets.items():
                    parts = values[name].split(counts[index].tolist())
                    for row, part in zip(target.select(index), parts, strict=True):
                        row.copy_(part)

        return shaped(self.filled(sizes, write))

    def _written(
        self, specs: Sequence[Spec], write: Callable[[Sequence[Tensor]], None]
    ) -> list[Tensor]:
        """Returns 1D tensors, shared by the processes of this host, into which each of these
        processes has written its elements; see `filled` for the arguments.
        """
        sizes = [size * dtype.itemsize for dtype, size in specs]
        if not any(sizes):
            return [torch.zeros(0, dtype=dtype) for dtype, _ in specs]
        if self.alone:
            found = [torch.zeros(size, dtype=dtype) for dtype, size in specs]
            write(found)
            return found
        # separate memory for each tensor, freed when the tensor's last view is freed
        made = [shared.create(size) if self.first and size else "" for size in sizes]
        told = [made]
        dist.broadcast_object_list(told, self._leader, group=self._host_group)
        found = []
        for name, size, (dtype, _) in zip(told[0], sizes, specs, strict=True):
            memory = _mapped(name, size) if name else torch.zeros(0, dtype=torch.uint8)
            found.append(memory.view(dtype))
        write(found)
        self._meet()
        for name in filter(None, made):
            shared.close(name)  # who has it mapped keeps it
        return found

    def _meet(self) -> None:
        if not self.alone:
            dist.barrier(self._host_group)


def current() -> HostMemory:
    """Returns the HostMemory of the current default process group; the first call for a group is a
    collective.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if not _current or _current[0][0] is not world:
        _current[:] = [(world, HostMemory())]
    return _current[0][1]


_current: list[tuple[Any, HostMemory]] = []  # with the group that it was made for


def this_host() -> str:
    """Returns a name of this host that differs between containers whose processes can't open each
    other's memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _tried(names: Sequence[str]) -> list[str]:
    """Tests whether the processes of each host can share memory, and returns a host name for each
    rank.

    `names`: the host name of each rank. On a host where a process can't open shared memory of the
    first one, every process gets a separate name, so that no memory is shared.
    """
    rank = dist.get_rank()
    first = names.index(names[rank])
    made = shared.create(1) if first == rank else ""
    offered = gather_objects(made)
    failed = ""
    try:
        os.close(shared.opened(offered[first], 1))
    except ValueError as error:
        failed = str(error)
    told = gather_objects(failed)
    if made:
        shared.close(made)
    broken = {name: why for name, why in zip(names, told, strict=True) if why}
    if rank == 0:
        for name, why in broken.items():
            log.warning(
                "Processes of %s can't share memory (%s): each keeps its own copy of a rollout.",
                name.split()[0],
                why,
            )
    return [f"{name} {i}" if name in broken else name for i, name in enumerate(names)]


def _add_up(memory: Tensor, group: Any) -> None:
    """Sums the bytes of `memory` over the processes of `group` (None: all), in place; each byte
    must be nonzero on at most one of them.
    """
    here = device.current().here()
    for bucket in memory.split(BUCKET):
        moved = bucket.to(here)
        dist.all_reduce(moved, group=group)
        if moved is not bucket:
            bucket.copy_(moved)


def _mapped(name: str, size: int) -> Tensor:
    """Maps the shared memory block `name` of `size` bytes and returns it as a tensor of bytes;
    unlike Python's mmap, the mapping keeps no file descriptor open.
    """
    descriptor = shared.opened(name, size)
    try:
        path = f"/proc/self/fd/{descriptor}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Place:
    """_Place replaces a shared tensor in a nested object that is sent to other processes: the
    tensor's index among the shared tensors, and its shape.
    """

    number: int
    shape: tuple[int, ...]


def _taken_apart(thing: Any, tensors: list[Tensor]) -> Any:
    """Returns a copy of the nested object `thing` in which a _Place replaces each large tensor, and
    appends these tensors to `tensors`.
    """
    if isinstance(thing, Tensor):
        if thing.nbytes <= SMALL:
            return thing.contiguous()
        tensors.append(thing)
        return _Place(len(tensors) - 1, tuple(thing.shape))
    return _rebuilt(thing, lambda part: _taken_apart(part, tensors))


def _put_together(thing: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(thing, _Place):
        return tensors[thing.number].view(thing.shape)
    return _rebuilt(thing, lambda part: _put_together(part, tensors))


def _rebuilt(thing: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of a dataclass, dict, list or tuple `thing` with `change` applied to each
    element; any other object is returned unchanged.
    """
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(
            thing, **{own.name: change(getattr(thing, own.name)) for own in fields(thing)}
        )
    if isinstance(thing, dict):
        return {name: change(part) for name, part in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*map(change, thing))
    if isinstance(thing, list | tuple):
        return type(thing)(map(change, thing))
    return thing
