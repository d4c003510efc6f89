"""CUDA as a device: NCCL, bfloat16."""

import torch

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


class CUDA:
    type = "cuda"
    collectives = "nccl"
    train_dtype = torch.bfloat16
    reason = "torch sees a CUDA device"

    start_method = "spawn"  # a forked process can't use CUDA once its parent has looked for it

    _earlier = 0  # bytes at most, in stretches of this phase that `forget_peak` has ended
    _told = False  # the present stretch's, of a phase that has ended

    def devices(self) -> int | None:
        """Devices of this host, one a process."""
        return torch.cuda.device_count()

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Each process of a host takes the device of its local rank."""
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def here(self) -> torch.device:
        """The device of this process."""
        return torch.device("cuda", torch.cuda.current_device())

    def random_state(self) -> torch.Tensor:
        """Of the generator that dropout draws from."""
        return torch.cuda.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size] on the host, pinned: quick to copy to and from the device."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def release_unused(self) -> None:
        """Gives freed memory back to others on this device (the rollout engine), past torch's cache."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def finish(self) -> None:
        """Waits until what was queued is computed, but for no message that nobody has asked for yet: a neighbour may send it
        only after it got one from here.
        """
        torch.cuda.current_stream().synchronize()

    def moment(self) -> torch.cuda.Event:
        """Now, as the computation sees it; see `seconds`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between two moments. Waits for the second."""
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def peak_tflops(self) -> float | None:
        """TFLOP/s of this device in bfloat16 without sparsity, as its data sheet says; None where its name is not known."""
        name = torch.cuda.get_device_name()
        return next((peak for part, peak in PEAKS.items() if part in name), None)

    def peak_bytes(self) -> int:
        """Bytes of tensors at most, in all stretches between `forget_peak`s since this was last asked."""
        most = max(self._earlier, torch.cuda.max_memory_allocated())
        self._earlier, self._told = 0, True
        return most

    def memory(self) -> dict[str, int]:
        """Bytes of this device: of tensors now and at most, and in torch's cache."""
        now, most, cached = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        return {"allocated": now, "most_allocated": most, "reserved": cached}

    def forget_peak(self) -> None:
        """`most_allocated` of `memory` counts from here."""
        self._earlier = 0 if self._told else max(self._earlier, torch.cuda.max_memory_allocated())
        self._told = False
        torch.cuda.reset_peak_memory_stats()
