"""Computes the checksum of frozen weights, which a checkpoint of adapters refers to but does not
contain.
"""

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.core.shards import Shard, as_integers
from rftmega.runtime.parallel.collectives import gather_objects


@torch.no_grad()
def sum_of(shards: Iterable[Shard], where: torch.device) -> int:
    """Returns a checksum of a whole model's weights that does not depend on the parallel layout; a
    collective over processes that compute on the device `where`.

    The `shards` of all processes together must contain each element exactly once.
    """
    total = torch.zeros((), dtype=torch.int64, device=where)
    for shard in shards:
        for number, name in enumerate(shard.logical.names):
            for _, elements in shard.views(number):
                total += share_of(name, elements).to(where)
    dist.all_reduce(total)
    return int(total)


def dtypes_beside(dtype: torch.dtype, shards: Iterable[Shard]) -> dict[str, str]:
    """Returns the dtypes of a whole model's weights that are of another one than `dtype`, by name;
    a collective. `shards`: see `sum_of`.
    """
    own = {
        name: str(shard.tensor.dtype).removeprefix("torch.")
        for shard in shards
        for name in shard.logical.names
        if shard.tensor.dtype != dtype
    }
    whole: dict[str, str] = {}
    for each in gather_objects(own):
        whole |= each
    return dict(sorted(whole.items()))


def share_of(name: str, elements: Tensor) -> Tensor:
    """Returns what these elements of the weight `name`, in any shape and dtype, add to the checksum."""
    return zlib.crc32(name.encode()) * as_integers(elements).sum(dtype=torch.int64)
