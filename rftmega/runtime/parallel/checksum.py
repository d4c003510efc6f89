"""Computes checksums of tensors, by which a process verifies that it reads the bytes that another
process wrote.
"""

from functools import cache, lru_cache

import torch
from torch import Tensor

BLOCK = 64  # bytes
LANES = torch.tensor([1, 3, 5, 7, 11, 13, 17, 19])  # odd, and different
# bytes that `checksums` processes together; its temporary memory is a quarter of that
AT_ONCE = 64 * 2**20

SMALL = 2**20  # bytes up to which fewer operations count more than temporary memory


def blocks(size: int) -> int:
    """Returns `size`, a number of bytes, rounded up to a multiple of BLOCK."""
    return -(-size // BLOCK) * BLOCK


def checksum(data: Tensor) -> Tensor:
    """Returns the checksum ([] int64) of `data`, a tensor of bytes whose length is a multiple of
    BLOCK, computed on the data's device.

    The checksum adds a sum of the 8-byte words weighted by their position within a block, and a sum
    weighted by the index of the block: it changes if words change, or if words or blocks are
    swapped.
    """
    return _sums(data.view(torch.int64).view(1, -1, len(LANES)))[0]


def checksums(slices: Tensor) -> Tensor:
    """Returns the checksums [n] int64 of n equal slices [n, ...], which need not be contiguous.

    A slice that does not fill its last block is padded with zeros.
    """
    if not slices.numel():
        return torch.zeros(len(slices), dtype=torch.int64, device=slices.device)
    flat = slices.reshape(len(slices), -1)
    size = flat.shape[1] * flat.itemsize
    step = max(1, AT_ONCE // size)
    if len(flat) <= step:
        return _sums(_words(flat, size))
    return torch.cat([_sums(_words(part, size)) for part in flat.split(step)])


def _words(flat: Tensor, size: int) -> Tensor:
    """Converts n slices of `size` bytes, [n, elements], to int64 words [n, blocks, words of a
    block].

    Copies the data if a slice does not fill its last block, or if 8-byte words would not be
    aligned.
    """
    aligned = (
        flat.storage_offset() * flat.itemsize % 8 == 0 and flat.stride(0) * flat.itemsize % 8 == 0
    )
    if size % BLOCK or flat.stride(1) != 1 or not aligned:
        padded = torch.zeros(len(flat), blocks(size), dtype=torch.uint8, device=flat.device)
        padded[:, :size].view(flat.dtype).copy_(flat)
        flat = padded
    return flat.view(torch.int64).unflatten(1, (-1, len(LANES)))


def _sums(words: Tensor) -> Tensor:
    """Computes the checksums [n] of n slices, given as int64 words [n, blocks, words of a block]."""
    number, blocks_each = words.shape[:2]
    if number * blocks_each * BLOCK <= SMALL:
        return (words * _weights(words.device, blocks_each)).sum((1, 2))
    places = 2 * torch.arange(blocks_each, device=words.device) + 1
    return (words.sum(1) * _lanes(words.device)).sum(1) + 31 * (words.sum(2) * places).sum(1)


@cache
def _lanes(where: torch.device) -> Tensor:
    return LANES.to(where)


@lru_cache(maxsize=64)
def _weights(where: torch.device, blocks_each: int) -> Tensor:
    """Returns the weight of each 8-byte word in the checksum of a slice, [blocks, words of a
    block], on the device `where`; `blocks_each`: number of blocks of a slice.
    """
    return _lanes(where) + 31 * (2 * torch.arange(blocks_each, device=where) + 1)[:, None]
