"""The CPU as a device: gloo, float32, nothing to synchronise."""

import os

import torch


class CPU:
    type = "cpu"
    collectives = "gloo"
    train_dtype = torch.float32
    reason = "no CUDA device is visible"

    start_method = "forkserver"

    def devices(self) -> int | None:
        """No limit to the processes of this host."""
        return None

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Shares the cores between the processes of this host; more threads than cores only wait for each other."""
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // local_world_size))
        return torch.device("cpu")
