"""CUDA as a device: NCCL, bfloat16."""

import torch


class CUDA:
    type = "cuda"
    collectives = "nccl"
    train_dtype = torch.bfloat16
    reason = "torch sees a CUDA device"

    start_method = "spawn"  # a forked process can't use CUDA once its parent has looked for it

    def devices(self) -> int | None:
        """Devices of this host, one a process."""
        return torch.cuda.device_count()

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Each process of a host takes the device of its local rank."""
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
