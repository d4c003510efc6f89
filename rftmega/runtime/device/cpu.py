"""The CPU device: collectives by gloo, training in float32, synchronous execution."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rftmega.runtime.device.threads import limit_threads

# Large tensors use pages of 2 MiB: freeing them page by page was a third of the time of offloading.
# Torch reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class Done:
    """Done is the handle that an asynchronous copy returns: on a CPU the copy is synchronous and
    thus finished already.
    """

    def hold(self) -> None: ...

    def wait(self) -> None: ...


class CPU:
    type = "cpu"
    collectives = "gloo"
    train_dtype = torch.float32
    reason = "no CUDA device is visible"

    start_method = "forkserver"

    def devices(self) -> int | None:
        """Returns None: the number of devices doesn't limit the number of processes on this host."""
        return None

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Returns the CPU device, after setting torch's threads (`limit_threads`)."""
        limit_threads(local_world_size)
        return torch.device("cpu")

    def here(self) -> torch.device:
        """Returns the device of this process."""
        return torch.device("cpu")

    def random_state(self) -> torch.Tensor:
        """Returns the state of torch's generator, from which dropout draws."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised host buffer of `size` elements."""
        return torch.empty(size, dtype=dtype)

    def copy_aside(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Done:
        """Copies each pair's first tensor to its second, and returns a handle of the finished copy."""
        for source, target in pairs:
            target.copy_(source)
        return Done()

    def has_fp8_matmul(self) -> bool:
        """Returns whether engines can run FP8 matmuls on this processor: it must support AMX."""
        return torch.cpu._is_amx_tile_supported()

    def prepare_fp8(self) -> None:
        """Requests permission to use AMX tiles from the kernel, as each process must: without it
        the process's first FP8 matmul kills the process.
        """
        torch.cpu._init_amx()

    def fp8_matmuls(self) -> tuple[str, ...]:
        """Returns the values of the config option model.fp8 that this device supports: () on a CPU."""
        return ()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function unchanged: on a CPU, fusing kernels saves little, because
        intermediate results stay in its caches.
        """
        return function

    def release_unused(self) -> None:
        """Does nothing: the CPU's allocator returns freed memory to the system."""

    def synchronize(self) -> None:
        """Does nothing: a CPU executes operations in order."""

    def finish(self) -> None:
        """Does nothing: a CPU has no queued work."""

    def moment(self) -> float:
        """Returns a timestamp; `seconds` gives the time between two of them."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Returns the seconds between two timestamps of `moment`."""
        return end - begin

    def described(self) -> str:
        """Returns a text that names the processor, its cores and the torch version."""
        return (
            f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; torch {torch.__version__}"
        )

    def peak_tflops(self) -> float | None:
        """Returns None: the peak TFLOP/s of a CPU is unknown."""
        return None

    def peak_bytes(self) -> int:
        """Returns the bytes of main memory that this process occupies now: a CPU records no peak."""
        return self.memory()["resident"]

    def room(self) -> int:
        """Returns the bytes of memory that are available on this host."""
        return _host_memory("MemAvailable")

    def capacity(self) -> int:
        """Returns the bytes of memory of this host, used or not."""
        return _host_memory("MemTotal")

    @contextmanager
    def waits(self) -> Iterator[list[str] | None]:
        """Yields None, since a CPU has no queue of work to wait for. On CUDA this context manager
        yields a list of the code lines where the host waits for the device.
        """
        yield None

    def memory(self) -> dict[str, int]:
        """Returns {"resident": bytes of this process in main memory}."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}

    @contextmanager
    def remapping(self) -> Iterator[None]:
        """Does nothing: on a CPU no engine frees device memory that would have to be measured
        within the `with` block.
        """
        yield

    def nothing_remapped(self) -> None:
        """Does nothing: on a CPU `remapping` measures nothing that would have to be reset."""

    def forget_peak(self) -> None:
        """Does nothing: a CPU records no peak."""


def _host_memory(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kib) * 1024
