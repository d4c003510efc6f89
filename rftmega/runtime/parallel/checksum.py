"""Computes checksums of tensors, to verify that one process reads what another wrote."""

from functools import cache, lru_cache

import torch
from torch import Tensor

BLOCK = 64  # bytes
LANES = torch.tensor([1, 3, 5, 7, 11, 13, 17, 19])  # odd, and different
# bytes that `checksums` processes together; its temporary memory is a quarter of that
AT_ONCE = 64 * 2**20

SMALL = 2**20  # bytes up to which fewer operations count more than temporary memory


def blocks(size: int) -> int:
    """Returns `size` in bytes, rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def checksum(data: Tensor) -> Tensor:
    """Returns the checksum, [] int64, of [bytes] in whole blocks, computed on the data's device.

    It is a sum of 8-byte words, weighted by their position in a block, and one weighted by the
    block: it changes if words or rows are swapped, and if words change.
    """
    return _of_vocabulary(data.view(torch.int64).view(1, -1, len(LANES)))[0]


def checksums(slices: Tensor) -> Tensor:
    """Returns the checksum, [n] int64, of each of n equal slices [n, ...], which need not be
    contiguous, as if zeros filled its last block.
    """
    if not slices.numel():
        return torch.zeros(len(slices), dtype=torch.int64, device=slices.device)
    flat = slices.reshape(len(slices), -1)
    size = flat.shape[1] * flat.itemsize
    step = max(1, AT_ONCE // size)
    if len(flat) <= step:
        return _of_vocabulary(_words(flat, size))
    return torch.cat([_of_vocabulary(_words(part, size)) for part in flat.split(step)])


def _words(flat: Tensor, size: int) -> Tensor:
    """Maps [n, elements] to [n, blocks, words].

    Copies if blocks are not full, or words would not be aligned.
    """
    aligned = (
        flat.storage_offset() * flat.itemsize % 8 == 0 and flat.stride(0) * flat.itemsize % 8 == 0
    )
    if size % BLOCK or flat.stride(1) != 1 or not aligned:
        padded = torch.zeros(len(flat), blocks(size), dtype=torch.uint8, device=flat.device)
        padded[:, :size].view(flat.dtype).copy_(flat)
        flat = padded
    return flat.view(torch.int64).unflatten(1, (-1, len(LANES)))


def _of_vocabulary(words: Tensor) -> Tensor:
    """Maps words [n, blocks, words] to checksums [n]."""
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
    """Returns the weight of each word, [blocks, words]."""
    return _lanes(where) + 31 * (2 * torch.arange(blocks_each, device=where) + 1)[:, None]
