"""The CPU as a device: gloo, float32, nothing to synchronise."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Large tensors in pages of 2 MiB: freeing them page by page was a third of the time that offloading
# takes. Torch reads it at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class Done:
    """A copy that is over, as every copy of a CPU's is."""

    def hold(self) -> None: ...

    def wait(self) -> None: ...


class CPU:
    type = "cpu"
    collectives = "gloo"
    train_dtype = torch.float32
    reason = "no CUDA device is visible"

    start_method = "forkserver"

    def devices(self) -> int | None:
        """Returns None: there is no limit to the processes of this host."""
        return None

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Shares the cores between the processes of this host.

        More threads than cores only wait for each other.
        """
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // local_world_size))
        return torch.device("cpu")

    def here(self) -> torch.device:
        """Returns the device of this process."""
        return torch.device("cpu")

    def random_state(self) -> torch.Tensor:
        """Returns the state of the generator that dropout draws from."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns [size] on the host, quick to copy to and from the device."""
        return torch.empty(size, dtype=dtype)

    def copy_aside(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Done:
        """Copies each pair's first to its second."""
        for source, target in pairs:
            target.copy_(source)
        return Done()

    def has_fp8_matmul(self) -> bool:
        """Returns whether engines can compute with numbers of 8 bits here: they need AMX."""
        return torch.cpu._is_amx_tile_supported()

    def prepare_fp8(self) -> None:
        """Asks the kernel for AMX's tiles, which each process has to: without them its first product
        ends it.
        """
        torch.cpu._init_amx()

    def fp8_matmuls(self) -> tuple[str, ...]:
        """Returns the values of model.fp8 that can be computed here: none."""
        return ()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function: a CPU's caches make up for most of what fewer kernels would save."""
        return function

    def release_unused(self) -> None:
        """Gives freed memory back to others on this device: a CPU's allocator does so by itself."""

    def synchronize(self) -> None:
        """Does nothing: a CPU runs in order."""

    def finish(self) -> None:
        """Waits until what was queued is computed."""

    def moment(self) -> float:
        """Returns now, as the computation sees it; see `seconds`."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Returns the seconds between two moments."""
        return end - begin

    def described(self) -> str:
        """Describes the processor and torch, for people."""
        return (
            f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; torch {torch.__version__}"
        )

    def peak_tflops(self) -> float | None:
        """Returns None: a CPU's peak is not known."""
        return None

    def peak_bytes(self) -> int:
        """Returns the bytes in memory now: a CPU keeps no record of the most."""
        return self.memory()["resident"]

    def room(self) -> int:
        """Returns the bytes of memory that the system could give."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kib) * 1024

    @contextmanager
    def waits(self) -> Iterator[list[str] | None]:
        """Gathers where the host waits for the device within: None, since a CPU computes in order."""
        yield None

    def memory(self) -> dict[str, int]:
        """Returns the bytes that this process has in memory."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}

    @contextmanager
    def remapping(self) -> Iterator[None]:
        """Within, an engine may give memory back: on a CPU none does."""
        yield

    def nothing_remapped(self) -> None:
        """Does nothing, since nothing is."""

    def forget_peak(self) -> None:
        """Does nothing: a CPU's memory is measured as it is."""
