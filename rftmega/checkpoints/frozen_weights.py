"""Computes the checksum of frozen weights, which a checkpoint of adapters refers to but does not
contain.
"""

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from rftmega.core.shards import Shard

WORDS = {2: torch.int16, 4: torch.int32}


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
                words = elements.view(WORDS[elements.itemsize])
                total += (zlib.crc32(name.encode()) * words.sum(dtype=torch.int64)).to(where)
    dist.all_reduce(total)
    return int(total)
