"""A checksum of slices is that of each by itself, wherever and however they lie."""

import pytest
import torch
from torch import Tensor

from rftmega.runtime.parallel import checksum as module
from rftmega.runtime.parallel.checksum import BLOCK, LANES, checksum, checksums


def by_hand(elements: Tensor) -> int:
    """With Python's numbers, word for word."""
    data = bytes(elements.contiguous().view(torch.uint8).flatten().tolist())
    data += bytes(-len(data) % BLOCK)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    lanes = LANES.tolist()
    total = (
        sum(
            word * (lanes[place % 8] + 31 * (2 * (place // 8) + 1))
            for place, word in enumerate(words)
        )
        % 2**64
    )
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize(
    "slices",
    [
        lambda: torch.randn(5, 6, 16),
        lambda: torch.randn(5, 6, 16)[:, 1:3],
        lambda: torch.randn(5, 6, 16)[:, :, 3:5],
        lambda: torch.randn(3, 7),
        lambda: torch.randn(4, 32)[:, ::2],
        lambda: torch.randn(3, 33, dtype=torch.bfloat16)[:, 1:],
        lambda: torch.randn(200)[3:].as_strided((4, 32), (40, 1), 3),
        lambda: torch.randn(1, 4, 4).double(),
        lambda: torch.empty(3, 0),
    ],
)
def test_every_slice_has_the_checksum_that_it_has_by_itself(slices) -> None:  # type: ignore[no-untyped-def]
    found = slices()
    assert checksums(found).tolist() == [by_hand(each) for each in found]


def test_large_slices_and_many_of_them_have_the_same_checksums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slices = torch.randn(7, 64, 16)
    whole = checksums(slices)
    monkeypatch.setattr(module, "SMALL", 0)
    assert torch.equal(checksums(slices), whole)
    monkeypatch.setattr(module, "AT_ONCE", 3 * 4096)  # three, three and one
    assert torch.equal(checksums(slices), whole)
    assert [
        int(checksum(each.contiguous().view(torch.uint8).flatten())) for each in slices
    ] == whole.tolist()
