"""Attention over tokens that processes share, against scores written out in float64."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.backends.megatron.forward import pack
from rftmega.models.layers.context_attention import attend_across, chunks_of
from tests.allocations import most_bytes
from tests.ranks import run_ranks
from tests.unit.models.layers.test_attention import dense

LENGTHS = [24, 8, 24, 16, 8, 40]
HEADS, GROUPS, SCALE = 4, 2, 0.3


class Given(NamedTuple):
    """Queries, keys and values of all tokens, a weight of every output, and sinks."""

    query: Tensor  # [T, heads, d]
    key: Tensor
    value: Tensor
    weight: Tensor  # [T, heads, d of values]
    sinks: Tensor


def given(lengths: list[int], width: int, values: int, dtype: torch.dtype) -> Given:
    torch.manual_seed(1)
    total = sum(lengths)
    shapes = [(HEADS, width), (GROUPS, width), (GROUPS, values), (HEADS, values)]
    return Given(
        *(torch.randn(total, *shape, dtype=dtype) for shape in shapes), torch.randn(HEADS).to(dtype)
    )


def attended_body(
    world: Any, lengths: list[int], width: int, values: int, with_sinks: bool
) -> list[Tensor]:
    """The places of this process's tokens, their outputs, and all gradients."""
    whole = given(lengths, width, values, torch.float64)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    packing = pack(mask, context=world.size, context_rank=world.rank, where=torch.device("cpu"))
    rows = mask.flatten().cumsum(0) - 1
    places = rows[packing.slots]
    own = [x[places].requires_grad_() for x in whole[:3]]
    sinks = whole.sinks.requires_grad_() if with_sinks else None
    chunks = chunks_of(packing.sequence, world.rank, world.size)
    found = attend_across(*own, chunks, dist.group.WORLD, SCALE, sinks)
    (found * whole.weight[places]).sum().backward()
    grads = [x.grad for x in own] + ([] if sinks is None else [sinks.grad])
    return [places, found.detach(), *grads]


@pytest.mark.parametrize(
    ("processes", "width", "values", "sinks"),
    [(2, 8, 8, False), (2, 12, 6, True), (4, 8, 8, True)],
)
def test_chunks_of_all_processes_attend_as_whole_rows_do(
    processes: int, width: int, values: int, sinks: bool
) -> None:
    """Rows of one length are one batch; heads have other sizes of values, and fewer keys."""
    whole = given(LENGTHS, width, values, torch.float64)
    tensors = [x.requires_grad_() for x in whole[:3]]
    if sinks:
        tensors.append(whole.sinks.requires_grad_())
    rows = []
    for row in zip(*(x.split(LENGTHS) for x in whole[:3]), strict=True):
        batch = [x.transpose(0, 1)[None] for x in row]
        of_row = dense(*batch, SCALE, 10**9, whole.sinks if sinks else None)
        rows.append(of_row[0].transpose(0, 1))
    wanted = torch.cat(rows)
    grads = torch.autograd.grad((wanted * whole.weight).sum(), tensors)
    total = torch.zeros(HEADS, dtype=torch.float64)
    for places, found, *own in run_ranks(processes, attended_body, LENGTHS, width, values, sinks):
        torch.testing.assert_close(found, wanted[places], rtol=1e-11, atol=1e-11)
        for grad, of_all in zip(own, grads[:3], strict=False):
            torch.testing.assert_close(grad, of_all[places], rtol=1e-10, atol=1e-10)
        total += own[3] if sinks else 0
    if sinks:  # each process's tokens take their part of it
        torch.testing.assert_close(total, grads[3], rtol=1e-10, atol=1e-10)


def stored_body(world: Any, length: int) -> int:
    """Bytes that the forward pass stores for the backward pass."""
    whole = given([length], 8, 8, torch.float32)
    mask = torch.ones(1, length, dtype=torch.bool)
    packing = pack(mask, context=world.size, context_rank=world.rank, where=torch.device("cpu"))
    own = [x[packing.slots].requires_grad_() for x in whole[:3]]
    chunks = chunks_of(packing.sequence, world.rank, world.size)
    stored: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = attend_across(*own, chunks, dist.group.WORLD, SCALE)
    most = most_bytes(lambda: attend_across(*own, chunks, dist.group.WORLD, SCALE))
    assert most > sum(stored.values()), "the gathered keys and values"
    found.sum().backward()
    return sum(stored.values())


def test_keys_and_values_of_other_processes_are_not_stored_for_the_backward_pass() -> None:
    """Own queries, keys, values and outputs, and the denominators, are."""
    length, processes = 4096, 4
    each = length // processes * 4 * (2 * HEADS * 8 + 2 * GROUPS * 8 + HEADS)
    assert run_ranks(processes, stored_body, length) == [each] * processes
