"""The CUDA device: collectives by NCCL, training in bfloat16, asynchronous execution."""

import importlib.util
import mmap
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rftmega.runtime.device import hardware
from rftmega.runtime.device.threads import limit_threads

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
    """Aside is the handle of a copy that runs on a separate CUDA stream."""

    def __init__(self, cuda: Any, done: Any):
        self._cuda, self._done = cuda, done

    def hold(self) -> None:
        """Makes the device finish the copy before any work that is queued on the current stream
        from now on; the host does not wait.
        """
        self._cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """Makes the host wait until the copy is complete."""
        self._done.synchronize()


class CUDA:
    type = "cuda"
    collectives = "nccl"
    train_dtype = torch.bfloat16
    reason = "torch sees a CUDA device"

    start_method = "spawn"  # a forked process can't use CUDA once its parent has looked for it

    _earlier = 0  # peak bytes of this phase's earlier stretches, which `forget_peak` has ended
    _told = False  # the current stretch was reported: its phase has ended
    _lent = 0  # bytes that torch counts as an engine's tensors, and that the engine has given back

    def __init__(self, cuda: Any = torch.cuda):
        """Creates the device; tests pass a substitute for torch.cuda."""
        self._cuda = cuda
        self._side: Any = None  # the stream of `copy_aside`

    def devices(self) -> int | None:
        """Returns the number of CUDA devices of this host; each process uses one."""
        return self._cuda.device_count()

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Selects and returns the device whose index is the local rank, and sets torch's threads
        (`limit_threads`).
        """
        self._cuda.set_device(local_rank)
        limit_threads(local_world_size)
        return torch.device("cuda", local_rank)

    def here(self) -> torch.device:
        """Returns the device of this process."""
        return torch.device("cuda", self._cuda.current_device())

    def random_state(self) -> torch.Tensor:
        """Returns the state of this device's generator, from which dropout draws."""
        return self._cuda.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self._cuda.set_rng_state(state)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a pinned host buffer of `size` elements, fast to copy to and from the device.

        Torch's own pinned memory comes in powers of two, up to twice the requested size. This
        buffer is a plain memory mapping, registered with the driver until the last tensor over it
        is freed.
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
        # At the array's end, not the mapping's, which would be gone already. At the process's end
        # the driver cleans up.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return buffer

    def copy_aside(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Aside:
        """Copies each pair's first tensor to its second, which is on the host, while the device
        continues with other work; returns a handle of the copy.
        The copy begins after the work that was queued before it.
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
        """Returns whether engines can run FP8 matmuls on this device: natively from compute
        capability 8.9 (Ada, Hopper), from 8.0 with kernels that upcast the FP8 numbers.
        """
        return self._cuda.get_device_capability() >= (8, 0)

    def prepare_fp8(self) -> None:
        """Does nothing: a process needs no permission for FP8 on a CUDA device."""

    def fp8_matmuls(self) -> tuple[str, ...]:
        """Returns the values of the config option model.fp8 that this device supports."""
        capability = self._cuda.get_device_capability()
        if capability >= (10, 0):
            return ("mxfp8",)
        return ("blockwise",) if capability >= (9, 0) else ()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function compiled by torch.compile to few kernels, or unchanged if triton,
        which torch.compile needs, is not installed.
        """
        if importlib.util.find_spec("triton") is None:
            return function
        return torch.compile(function)

    def release_unused(self) -> None:
        """Returns the unused memory in torch's cache to the device, for other users of the device
        such as the rollout engine.
        """
        self._cuda.empty_cache()

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def finish(self) -> None:
        """Waits until the work queued on the current stream is done, but not for communication on
        other streams.

        Waiting for communication could deadlock: a neighbouring process may send only after it has
        received from this one.
        """
        self._cuda.current_stream().synchronize()

    def moment(self) -> Any:
        """Returns a timestamp, an event on the current stream; `seconds` gives the time between two
        of them.
        """
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two timestamps of `moment`; waits until the device has
        reached `end`.
        """
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def described(self) -> str:
        """Returns a text that names the device, its memory, and the versions of the driver, CUDA
        and NCCL.
        """
        memory = self._cuda.get_device_properties(self._cuda.current_device()).total_memory
        nccl = ".".join(map(str, self._cuda.nccl.version()))
        return (
            f"{self._cuda.get_device_name()}, {memory / 1e9:.0f} GB; driver {hardware.found().driver or 'unknown'}, "
            f"CUDA {torch.version.cuda}, NCCL {nccl}"
        )

    def peak_tflops(self) -> float | None:
        """Returns the peak bfloat16 TFLOP/s of this device without sparsity, from its data sheet;
        None if the device's name is not in PEAKS.
        """
        name = self._cuda.get_device_name()
        return next((peak for part, peak in PEAKS.items() if part in name), None)

    def peak_bytes(self) -> int:
        """Returns the peak bytes of allocated tensors since the last call of `peak_bytes`, also
        across calls of `forget_peak`.
        An engine's tensors count only while they are in device memory.
        """
        most = max(self._earlier, self._most())
        self._earlier, self._told = 0, True
        return most

    def _most(self) -> int:
        return max(0, int(self._cuda.max_memory_allocated()) - self._lent)

    @contextmanager
    def remapping(self) -> Iterator[None]:
        """Measures how much device memory an engine frees as it goes to sleep, or takes as it
        wakes, within a `with` block; `peak_bytes` uses the result.

        Torch does not see this change (vLLM unmaps the memory of tensors that continue to exist),
        so `peak_bytes` would otherwise count a sleeping engine in every phase.
        """
        before = self.room()
        yield
        given_back = self.room() - before
        self.forget_peak()
        self._lent = max(0, self._lent + given_back)

    def nothing_remapped(self) -> None:
        """Resets the measurements of `remapping` once the engine has ended: torch no longer counts
        the engine's tensors.
        """
        self._lent = 0

    def room(self) -> int:
        """Returns the free bytes of this device, after freeing torch's cache."""
        self._cuda.empty_cache()
        free: int = self._cuda.mem_get_info()[0]
        return free

    def capacity(self) -> int:
        """Returns the bytes of memory of this device, used or not."""
        total: int = self._cuda.mem_get_info()[1]
        return total

    @contextmanager
    def waits(self) -> Iterator[list[str] | None]:
        """Collects the places where the host waits for the device within a `with` block, as
        "file:line" for each synchronisation that torch detects.
        The list is complete after the block.
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
        """Returns bytes of this device: "allocated" and "most_allocated" for tensors now and at
        their peak, and "reserved" for torch's cache.
        """
        now, most, cached = (
            self._cuda.memory_allocated(),
            self._cuda.max_memory_allocated(),
            self._cuda.memory_reserved(),
        )
        return {"allocated": now, "most_allocated": most, "reserved": cached}

    def forget_peak(self) -> None:
        """Resets the peak: `most_allocated` of `memory` then counts from this call."""
        self._earlier = 0 if self._told else max(self._earlier, self._most())
        self._told = False
        self._cuda.reset_peak_memory_stats()
