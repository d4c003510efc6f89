"""CUDA as a device: NCCL, bfloat16."""

import torch


class CUDA:
    type = "cuda"
    collectives = "nccl"
    train_dtype = torch.bfloat16
    reason = "torch sees a CUDA device"

    def select(self, local_rank: int, local_world_size: int) -> torch.device:
        """Each process of a host takes the device of its local rank."""
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_bytes(self) -> int:
        """Bytes that torch holds on this device."""
        return torch.cuda.memory_allocated()
