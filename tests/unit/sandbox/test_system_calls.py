import errno

import pytest

from rftmega.sandbox import kernel
from rftmega.sandbox.system_calls import ARCHITECTURES, DENIED, program

ALLOWED, REFUSED = 0x7FFF0000, 0x00050000 | errno.EPERM


def verdict(
    machine: str,
    number: int,
    argument: int = 0,
    architecture: int | None = None,
    own_pid: int | None = None,
) -> int:
    """What the filter says of a system call: classic BPF as its manual has it."""
    data = {
        0: number,
        4: ARCHITECTURES[machine][1] if architecture is None else architecture,
        16: argument,
    }
    compare = {0x15: lambda a, k: a == k, 0x35: lambda a, k: a >= k, 0x45: lambda a, k: bool(a & k)}
    steps, at, loaded = program(machine, own_pid=own_pid), 0, 0
    while True:
        code, yes, no, constant = steps[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            loaded = data[constant]
        else:
            at += yes if compare[code](loaded, constant) else no


# (read, write, socket, clone, clone3, kill) by the kernel's own tables
NUMBERS = {"x86_64": (0, 1, 41, 56, 435, 62), "aarch64": (63, 64, 198, 220, 435, 129)}


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_filter_refuses_what_it_says_and_lets_the_rest_through(machine: str) -> None:
    read, write, socket, clone, clone3, kill = NUMBERS[machine]
    assert verdict(machine, read) == verdict(machine, write) == verdict(machine, 439) == ALLOWED
    assert {
        verdict(machine, numbers[ARCHITECTURES[machine][0]]) for numbers in DENIED.values()
    } == {REFUSED}
    assert [verdict(machine, socket, family) for family in (1, 2, 10, 16)] == [
        ALLOWED,
        REFUSED,
        REFUSED,
        REFUSED,
    ]
    assert (
        verdict(machine, clone, 17) == ALLOWED
        and verdict(machine, clone, 17 | kernel.CLONE_NEWUSER) == REFUSED
    )
    assert verdict(machine, clone3) == 0x00050000 | errno.ENOSYS
    assert verdict(machine, read, architecture=0x40000003) == REFUSED, (
        "another architecture's numbers mean something else"
    )
    assert verdict(machine, 0x40000000 | read) == REFUSED


@pytest.mark.parametrize("machine", NUMBERS)
def test_signals_go_to_oneself_only_where_that_is_asked(machine: str) -> None:
    kill = NUMBERS[machine][-1]
    assert [verdict(machine, kill, pid, own_pid=99) for pid in (99, 98, 0xFFFFFFFF, 0)] == [
        ALLOWED
    ] + [REFUSED] * 3
    assert verdict(machine, kill, 98) == ALLOWED


def test_an_unknown_architecture_is_no_filter() -> None:
    with pytest.raises(KeyError):
        program("sparc", own_pid=None)
