"""Collectives for tensors on any device; a single process gets its own values back.

Every process of the group must call these functions in the same order.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.runtime import device

OPERATIONS = ("mean", "max", "sum")
MOST_DIMS = 8


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenates the tensors [N, ...] of all processes along the first dimension, in the order of
    ranks.
    A scalar counts as [1]. N may differ between processes, and be 0. Raises ValueError, on every
    process, if the other dimensions differ.
    """
    mine = tensor.reshape(1) if tensor.dim() == 0 else tensor
    if not dist.is_initialized():
        return mine.clone()
    here = device.current().here()
    shapes = gathered(
        torch.tensor([mine.dim(), *mine.shape] + [0] * (MOST_DIMS - mine.dim()), device=here)
    ).cpu()
    rest = [(int(shape[0]), *shape[2:].tolist()) for shape in shapes]
    if len(set(rest)) > 1:
        shown = [tuple(shape[1 : 1 + int(shape[0])].tolist()) for shape in shapes]
        raise ValueError(
            f"all_gather of shapes {shown}, rank by rank: all dimensions but the first must agree."
        )
    sizes = shapes[:, 1].tolist()
    padded = torch.zeros(max(sizes), *mine.shape[1:], dtype=mine.dtype, device=here)
    padded[: len(mine)] = mine
    everybodys = gathered(padded)
    return torch.cat([everybodys[rank, :size] for rank, size in enumerate(sizes)]).to(tensor.device)


def gathered(x: Tensor) -> Tensor:
    """Gathers the tensor `x` [...] of every process to [ranks, ...] on the device; its shape must
    be the same on every process.
    """
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return torch.stack(found)


def all_reduce(value: Tensor | float, op: str) -> Tensor | float:
    """Returns the mean, max or sum of a tensor or a number over all processes; a tensor keeps its
    shape and device.
    The argument is not modified. Numbers are summed in float64, tensors at least in float32;
    integers stay exact in sum and max; a number's mean is a float. Raises AssertionError for
    another `op`.
    """
    assert op in OPERATIONS, f"op={op!r} is not one of {', '.join(OPERATIONS)}."
    if isinstance(value, Tensor):
        return _reduced(value, op)
    kind = torch.int64 if isinstance(value, int) else torch.float64
    return _reduced(torch.tensor(value, dtype=kind), op).item()


def _reduced(value: Tensor, op: str) -> Tensor:
    if op == "mean" and not value.is_floating_point():
        value = value.double() if value.dtype == torch.int64 else value.float()
    wide = torch.float32 if value.is_floating_point() and value.itemsize < 4 else value.dtype
    if value.dtype == torch.bool:
        wide = torch.int64  # a count, or whether any is True
    found = value.detach().to(device.current().here(), wide, copy=True)
    size = 1
    if dist.is_initialized():
        size = dist.get_world_size()
        dist.all_reduce(found, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    if op == "mean":
        found /= size
    return found.to(
        value.device, wide if value.dtype == torch.bool and op == "sum" else value.dtype
    )


def neighbours(size: int) -> Any:
    """Creates process groups of `size` consecutive ranks each, and returns the one that contains
    this process; None stands for all processes.

    A collective over all processes, to be called once for each size.
    """
    world = dist.get_world_size()
    if size == world:
        return None
    assert world % size == 0, (world, size)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[dist.get_rank() // size]


def board() -> Any:
    """Returns the key-value store by which torch.distributed connected the processes; it can carry
    further messages at any time.
    """
    return dist.distributed_c10d._get_default_store()


def gather_objects(thing: Any, group: Any = None) -> list[Any]:
    """Returns the objects `thing` of all processes of `group` (None: all), in the order of ranks.

    The objects are pickled, so they should be small.
    """
    if not dist.is_initialized():
        return [thing]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, thing, group=group)
    return found
