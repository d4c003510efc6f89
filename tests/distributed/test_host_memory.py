"""Memory that the processes of a host share, on imagined hosts: who computes, what arrives, and
that there is one copy.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rftmega.core.ragged import Ragged
from rftmega.core.rollout_arrays import RolloutArrays
from rftmega.core.types import Completion, Prompt, Rollout, Trajectory
from rftmega.rollout.pool.gathered_rollouts import gathered, in_order, shared
from rftmega.runtime.parallel import host_memory
from rftmega.runtime.parallel import shared as shared_memory
from rftmega.runtime.parallel.host_memory import HostMemory, current
from rftmega.runtime.parallel.process_group import World
from tests.ranks import run_ranks
from tests.rollouts import rollout_of

LARGE = 50_000  # elements, more than are sent
HOSTS = ("aaaa", "abab", "abcd", "aaab")  # of each of four processes


class Found(NamedTuple):
    calls: int
    first: torch.Tensor
    part: Ragged
    number: float


def inode_of(tensor: torch.Tensor) -> str:
    """The memory that a tensor lies in, by the kernel's map of this process."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[4]
    raise AssertionError("no such memory")


def _each(world: World, body: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    return [body(world, *case) for case in cases]


def told_of(body: Callable[..., Any], cases: list[tuple[Any, ...]]) -> Iterator[tuple[Any, Any]]:
    """Each case, with what each of four processes says of it."""
    return zip(cases, zip(*run_ranks(4, _each, body, cases), strict=True), strict=True)


def _once(world: World, hosts: str) -> Any:
    host = HostMemory(hosts[world.rank])
    calls = [0]

    def make() -> Found:
        calls[0] += 1
        values = torch.arange(LARGE) * 1.5
        part = Ragged.packed(values.neg(), torch.tensor([LARGE - 10, 10]))
        return Found(world.rank, values, part, 0.1)

    found = host.once(make)
    assert torch.equal(found.first, torch.arange(LARGE) * 1.5)
    assert [len(row) for row in found.part] == [LARGE - 10, 10]
    assert torch.equal(found.part.flat, -found.first)
    assert found.number == 0.1

    def fail() -> None:
        raise ValueError("none of these numbers")

    with pytest.raises(Exception, match="none of these numbers"):
        host.once(fail)
    lies = inode_of(found.first)
    dist.barrier()
    return calls[0], found.calls, lies


def test_one_process_of_each_host_computes_and_the_others_map_what_it_made() -> None:
    for (hosts,), found in told_of(_once, [(hosts,) for hosts in HOSTS]):
        firsts = [hosts.index(name) for name in hosts]
        assert [calls for calls, *_ in found] == [
            int(rank == first) for rank, first in enumerate(firsts)
        ], hosts
        assert [told for _, told, _ in found] == firsts
        for rank, first in enumerate(firsts):
            if hosts.count(hosts[rank]) > 1:
                assert found[rank][2] == found[first][2] != "0", f"a copy was made: {hosts}"
        assert len({lies for *_, lies in found if lies != "0"}) == sum(
            hosts.count(name) > 1 for name in set(hosts)
        )


def _gathered(world: World, hosts: str, sizes: list[int]) -> Any:
    host = HostMemory(hosts[world.rank])
    generator = torch.Generator().manual_seed(world.rank)
    size = sizes[world.rank]
    numbers = torch.randn(size, generator=generator)
    numbers[:2] = torch.tensor([-0.0, float("nan")])[:size]
    columns = [numbers, torch.rand(size, generator=generator) < 0.5, numbers.mul(9).int()]
    found = host.gathered(columns, sizes)
    nothing = host.gathered([torch.zeros(0)], [0, 0, 0, 0])
    assert [len(column) for column in nothing] == [0]
    return [column.view(torch.uint8).clone() for column in columns], [
        column.view(torch.uint8).clone() for column in found
    ]


def test_every_process_sees_all_columns_to_the_last_bit_in_the_order_of_ranks() -> None:
    cases = [(hosts, [3, 0, size, 5]) for hosts in HOSTS for size in (70_000, 7)]
    for case, told in told_of(_gathered, cases):
        for number in range(3):
            wanted = torch.cat([columns[number] for columns, _ in told])
            for _, found in told:
                assert torch.equal(found[number], wanted), case


def _of_rows(world: World, hosts: str, small: int) -> list[list[list[float]]]:
    """Rows 0 to 6 of 0 to 6 numbers, of which process r has r and r + 4."""
    host_memory.SMALL = small
    host = HostMemory(hosts[world.rank])
    index = torch.arange(world.rank, 7, 4)
    padded = (10 * index[:, None] + torch.arange(6)).float()
    found = host.of_rows(torch.arange(7), 2, [(index, [padded, -padded])])
    return [[row.tolist() for row in column] for column in found]


def test_each_process_brings_its_rows_and_gets_all() -> None:
    wanted = [[10.0 * row + place for place in range(row)] for row in range(7)]
    cases = [(hosts, small) for hosts in HOSTS for small in (0, 10**6)]
    for case, told in told_of(_of_rows, cases):
        for one, other in told:
            assert one == wanted, case
            assert other == [[-number for number in row] for row in wanted], case


def _refused(world: World) -> Any:
    opened = shared_memory.opened

    def denied(name: str, size: int) -> int:
        raise ValueError(f"{name!r} can't be opened: Permission denied")

    shared_memory.opened = denied if world.rank == 3 else opened
    host = HostMemory("aabb"[world.rank])
    return *_sees(host, world.rank), host.alone


def _sees(host: HostMemory, rank: int) -> tuple[int, list[int]]:
    calls: list[int] = []
    found = host.once(lambda: calls.append(rank) or torch.full((LARGE,), 7))
    assert bool((found == 7).all())
    (column,) = host.gathered([torch.tensor([rank])], [1, 1, 1, 1])
    return len(calls), column.tolist()


def test_processes_that_cannot_open_each_others_memory_keep_copies_of_their_own() -> None:
    found = run_ranks(4, _refused)
    assert [calls for calls, *_ in found] == [1, 0, 1, 1]
    assert [column for _, column, _ in found] == [[0, 1, 2, 3]] * 4
    assert [alone for *_, alone in found] == [False, False, True, True]


PROMPTS = [Prompt((task, 7), index=task) for task in range(6)]
OWN = [(4, 0), (), (5,), (1, 2)]  # tasks of each process; nobody has 3


def answer_of(task: int) -> Rollout:
    ids = tuple(range(task, 2 * task + 3))
    completion = Completion(
        ids, tuple(-0.5 * n for n in ids), "length" if task % 2 else "stop", task
    )
    return rollout_of(PROMPTS[task], completion, {"reward": float(task)})


def _rollouts(world: World, hosts: str) -> Any:
    host_memory.SMALL = 0
    host = HostMemory(hosts[world.rank])
    own = {task: answer_of(task) for task in OWN[world.rank]}
    where, rollouts, said = gathered(own, host, world.rank, "said")
    assert said == [(rank, "said") for rank in range(4)]
    found = in_order(where, rollouts, len(PROMPTS))
    for again in (found, shared(list(found), host), RolloutArrays.of(list(found))):
        assert [again[task] for task in range(6)] == [
            None if task == 3 else answer_of(task) for task in range(6)
        ]
    two = found.select([2, 5])
    assert [len(row) for row in two.column("token_ids")] == [7, 10]
    assert two.column("token_ids").values.data_ptr() == found.columns["token_ids"].data_ptr()
    return inode_of(found.columns["logprobs"])


def test_rollouts_of_all_engines_come_to_every_process_and_lie_once_on_each_host() -> None:
    for (hosts,), told in told_of(_rollouts, [("aaaa",), ("abab",)]):
        assert len(set(told)) == len(set(hosts))
        assert "0" not in told


def _forgotten(world: World) -> None:
    """Memory goes with its last tensor, and no descriptor stays open."""
    host = current()
    assert current() is host

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def shared_kib() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem"))

    host.once(lambda: torch.ones(10 * LARGE))
    before, held = descriptors(), shared_kib()
    for _ in range(20):
        kept = host.once(lambda: torch.ones(10 * LARGE))
    assert descriptors() == before
    assert shared_kib() - held < 3 * kept.nbytes / 1024


def test_memory_goes_with_its_last_tensor() -> None:
    run_ranks(2, _forgotten)


def test_a_trajectory_of_columns_is_a_view() -> None:
    arrays = RolloutArrays.of([answer_of(2), None, answer_of(4)])
    third = arrays[2]
    assert third is not None
    arrays.columns["token_ids"][-1] = 99
    assert third.trajectories[0].token_ids[-1] == 99
    assert arrays[1] is None
    assert arrays[1:][1] == third
    assert isinstance(third.trajectories[0], Trajectory)
