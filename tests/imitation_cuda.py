"""An imitation of `torch.cuda` on a CPU, for `rftmega.runtime.device.CUDA`: streams, events, pinned memory
and what they were asked.

Tensors of the "device" are a CPU's. What a real one would do later is done later here: a copy to
pinned memory that nobody waits for, and all that is asked of another stream, happen when an event
or a device is synchronised, or when later work of the same stream needs them.
"""

import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rftmega.runtime import device
from rftmega.runtime.device import CUDA, spans

COPY = torch.ops.aten.copy_.default


class Stream:
    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        with self._lock, _disable_current_modes():
            while self.work:
                self.work.pop(0)()

    def wait_stream(self, other: "Stream") -> None:
        other.synchronize()

    def wait_event(self, event: "Event") -> None:
        event.synchronize()


class Event:
    """`time` is the imitation's clock when it was recorded: one tick a question."""

    def __init__(self, cuda: "ImitationCUDA"):
        self._cuda = cuda

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self._cuda.here
        self._cuda.ticks += 1
        self.time = self._cuda.ticks

    def synchronize(self) -> None:
        self.stream.synchronize()

    def elapsed_time(self, end: "Event") -> float:
        return float(end.time - self.time)


class _Deferring(TorchDispatchMode):
    """Puts off what runs in another stream, and copies to pinned memory that are not waited for."""

    def __init__(self, cuda: "ImitationCUDA"):
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda, run = self.cuda, lambda: func(*args, **(kwargs or {}))
        if func is not COPY:
            return run()
        later = bool(args[2]) if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
        if cuda.is_pinned(args[0]) and not cuda.is_pinned(args[1]):
            cuda.copied_to_host += args[0].nbytes
        else:
            cuda.main.synchronize()  # in order, and the device waits for nobody else
        if cuda.here is cuda.main and not (later and cuda.is_pinned(args[0])):
            return run()
        size = args[1].untyped_storage().nbytes()

        def run_later() -> None:
            assert args[1].untyped_storage().nbytes() == size, (
                "memory was freed before it was copied"
            )
            run()

        cuda.here.work.append(run_later)
        return args[0]


class ImitationCUDA:
    """Counts bytes: `pinned` of host memory now, `copied_to_host` so far."""

    def __init__(self) -> None:
        self.main = self.here = Stream()
        self.streams = [self.main]
        self.ranges: dict[int, int] = {}
        self.pinned = self.copied_to_host = self.emptied = self.ticks = self.waited = self.most = 0
        self.sync_mode: Any = 0

    def Stream(self) -> Stream:  # noqa: N802  as torch.cuda calls it
        self.streams.append(Stream())
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802
        return Event(self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.here = stream
        yield
        self.here = self.main

    def current_stream(self) -> Stream:
        self.waited += 1
        return self.here

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def get_sync_debug_mode(self) -> int:
        return self.sync_mode

    def set_sync_debug_mode(self, mode: str | int) -> None:
        self.sync_mode = {"default": 0, "warn": 1}.get(str(mode), mode)

    def read(self, tensor: torch.Tensor) -> float:
        """`tensor.item()` of a tensor of the device: the host waits, and is warned as torch warns."""
        self.synchronize()
        if self.sync_mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return tensor.item()

    def mem_get_info(self) -> tuple[int, int]:
        return 50_000_000_000, 80_000_000_000

    def empty_cache(self) -> None:
        self.emptied += 1

    def memory_allocated(self) -> int:
        return 0

    memory_reserved = memory_allocated

    def max_memory_allocated(self) -> int:
        return self.most

    def reset_peak_memory_stats(self) -> None:
        self.most = 0

    def get_device_capability(self) -> tuple[int, int]:
        return 9, 0

    def current_device(self) -> int:
        return 0

    def get_device_name(self) -> str:
        return "Imitation H100"

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(total_memory=80_000_000_000)

    nccl = SimpleNamespace(version=lambda: (2, 28, 3))

    def cudart(self) -> "ImitationCUDA":
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        ctypes.string_at(address + size - 1, 1)  # it must be ours
        self.ranges[address] = size
        self.pinned += size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        ctypes.string_at(address, 1)  # a driver wants it mapped still
        self.pinned -= self.ranges.pop(address)
        return 0

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        place = tensor.data_ptr()
        return any(start <= place < start + size for start, size in self.ranges.items())


@contextmanager
def imitated(patch: pytest.MonkeyPatch) -> Iterator[ImitationCUDA]:
    """Within, the program takes its tensors for a CUDA device's."""
    cuda = ImitationCUDA()
    accelerator = CUDA(cuda)
    patch.setattr(device, "current", lambda: accelerator)
    patch.setattr(spans, "current", lambda: accelerator)
    with _Deferring(cuda):
        yield cuda
        cuda.synchronize()
