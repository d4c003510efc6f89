"""CUDA as a device: NCCL, bfloat16."""

import importlib.util
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rftmega.runtime.device import hardware

PEAKS = {  # part of a device's name -> TFLOP/s; the first that fits
    "B200": 2250.0,
    "H200": 989.5,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


class Aside:
    """A copy on a stream of its own."""

    def __init__(self, cuda: Any, done: Any):
        self._cuda, self._done = cuda, done

    def hold(self) -> None:
        """Makes the device's later work wait for the copy."""
        self._cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """Makes the host wait for the copy."""
        self._done.synchronize()


class CUDA:
    type = "cuda"
    collectives = "nccl"
    train_dtype = torch.bfloat16
    reason = "torch sees a CUDA device"

    start_method = "spawn"  # a forked process can't use CUDA once its parent has looked for it

    _earlier = 0  # bytes at most, in stretches of this phase that `forget_peak` has ended
    _told = False  # the present stretch's, of a phase that has ended
    _lent = 0  # bytes that torch counts as an engine's tensors, and that the engine has given back

    def __init__(self, cuda: Any = torch.cuda):
        """`cuda`: what says torch.cuda; a test gives an imitation."""
        self._cuda = cuda
        self._side: Any = None  # the stream of copies aside

    def devices(self) -> int | None:
        """Devices of this host, one a process."""
        return self._cuda.device_count()

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Gives each process of a host the device of its local rank, and its share of the cores for
        work on the host.
        """
        self._cuda.set_device(local_rank)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        return torch.device("cuda", local_rank)

    def here(self) -> torch.device:
        """Returns the device of this process."""
        return torch.device("cuda", self._cuda.current_device())

    def random_state(self) -> torch.Tensor:
        """Returns the state of the generator that dropout draws from."""
        return self._cuda.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self._cuda.set_rng_state(state)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns [size] on the host, pinned: quick to copy to and from the device.

        Torch's own pinned memory comes in powers of two, up to twice what is asked for. This is a
        plain mapping that the driver is told of, until the last tensor over it is gone.
        """
        if not size:
            return torch.empty(0, dtype=dtype)
        memory = np.frombuffer(mmap.mmap(-1, size * dtype.itemsize), np.uint8)
        buffer = torch.from_numpy(memory).view(dtype)
        buffer.zero_()  # by all threads: the driver would touch the pages with one
        runtime, address = self._cuda.cudart(), buffer.data_ptr()
        if failed := int(runtime.cudaHostRegister(address, len(memory), 0)):
            raise MemoryError(
                f"{len(memory):,} bytes of host memory can't be pinned: cudaHostRegister says {failed}."
            )
        # The array's end, not the mapping's, which would be gone already. At the process's end the
        # driver sees to it.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return buffer

    def copy_aside(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Aside:
        """Copies each pair's first to its second, which is on the host, while the device goes on
        with other work. What it was asked for before comes first.
        """
        self._side = self._side or self._cuda.Stream()
        self._side.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._side):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            done = self._cuda.Event()
            done.record()
        return Aside(self._cuda, done)

    def has_fp8_matmul(self) -> bool:
        """Returns whether engines can compute with numbers of 8 bits here: since Ada and Hopper (8.9),
        and before by kernels that make them larger first (8.0).
        """
        return self._cuda.get_device_capability() >= (8, 0)

    def prepare_fp8(self) -> None:
        """Does nothing: a CUDA device needs no permission."""

    def fp8_matmuls(self) -> tuple[str, ...]:
        """Returns the values of model.fp8 that this device can compute."""
        capability = self._cuda.get_device_capability()
        if capability >= (10, 0):
            return ("mxfp8",)
        return ("blockwise",) if capability >= (9, 0) else ()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as few kernels; as it is where triton, which torch.compile needs, is
        not installed.
        """
        if importlib.util.find_spec("triton") is None:
            return function
        return torch.compile(function)

    def release_unused(self) -> None:
        """Gives freed memory back to others on this device (the rollout engine), past torch's
        cache.
        """
        self._cuda.empty_cache()

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def finish(self) -> None:
        """Waits until what was queued is computed, but for no message that nobody has asked for
        yet: a neighbour may send it only after it got one from here.
        """
        self._cuda.current_stream().synchronize()

    def moment(self) -> Any:
        """Returns now, as the computation sees it; see `seconds`."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two moments.

        Waits for the second.
        """
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def described(self) -> str:
        """Describes the device, the driver, CUDA and NCCL, for people."""
        memory = self._cuda.get_device_properties(self._cuda.current_device()).total_memory
        nccl = ".".join(map(str, self._cuda.nccl.version()))
        return (
            f"{self._cuda.get_device_name()}, {memory / 1e9:.0f} GB; driver {hardware.found().driver or 'unknown'}, "
            f"CUDA {torch.version.cuda}, NCCL {nccl}"
        )

    def peak_tflops(self) -> float | None:
        """TFLOP/s of this device in bfloat16 without sparsity, as its data sheet says.

        None where its name is not known.
        """
        name = self._cuda.get_device_name()
        return next((peak for part, peak in PEAKS.items() if part in name), None)

    def peak_bytes(self) -> int:
        """Returns the bytes of tensors at most, in all stretches between `forget_peak`s since this
        was last asked. Of an engine's only those that are there.
        """
        most = max(self._earlier, self._most())
        self._earlier, self._told = 0, True
        return most

    def _most(self) -> int:
        return max(0, int(self._cuda.max_memory_allocated()) - self._lent)

    @contextmanager
    def remapping(self) -> Iterator[None]:
        """Within, an engine that goes to sleep gives its memory back, or takes it as it wakes. Torch
        does not see it (vLLM unmaps the memory of tensors that live on), so `peak_bytes` would count
        a sleeping engine in every phase.
        """
        before = self.room()
        yield
        given_back = self.room() - before
        self.forget_peak()
        self._lent = max(0, self._lent + given_back)

    def nothing_remapped(self) -> None:
        """Says that the engine has ended: torch counts no tensors of it any more."""
        self._lent = 0

    def room(self) -> int:
        """Returns the bytes of this device that nobody holds, torch's cache included."""
        self._cuda.empty_cache()
        free: int = self._cuda.mem_get_info()[0]
        return free

    @contextmanager
    def waits(self) -> Iterator[list[str] | None]:
        """Gathers where the host waits for the device within: "file:line", as often as it happens
        and torch knows of it. The list is whole after the end.
        """
        found: list[str] = []
        before = self._cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            self._cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                self._cuda.set_sync_debug_mode(before)
                found += [
                    f"{each.filename}:{each.lineno}"
                    for each in heard
                    if "synchronizing CUDA" in str(each.message)
                ]

    def memory(self) -> dict[str, int]:
        """Returns the bytes of this device: of tensors now and at most, and in torch's cache."""
        now, most, cached = (
            self._cuda.memory_allocated(),
            self._cuda.max_memory_allocated(),
            self._cuda.memory_reserved(),
        )
        return {"allocated": now, "most_allocated": most, "reserved": cached}

    def forget_peak(self) -> None:
        """Makes `most_allocated` of `memory` count from here."""
        self._earlier = 0 if self._told else max(self._earlier, self._most())
        self._told = False
        self._cuda.reset_peak_memory_stats()
