"""Threads of a process: the user's number, otherwise its share of the cores."""

import os
from collections.abc import Iterator

import pytest
import torch

from rftmega.runtime.device import CPU
from rftmega.runtime.device.threads import DEFAULT, VARIABLE, choose_default, share

CORES = 12


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))
    for name in (VARIABLE, DEFAULT):
        monkeypatch.setenv(name, "")  # so that its value is restored
        monkeypatch.delenv(name)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "processes", "wanted"),
    [
        (None, 1, 12),
        (None, 5, 2),
        (None, 40, 1),
        ("3", 1, 3),
        ("7", 4, 7),
        ("5,2", 4, 5),
        ("0", 4, 3),
        ("many", 4, 3),
    ],
)
def test_the_users_number_of_threads_wins(
    given: str | None, processes: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    CPU().select(0, processes)
    assert torch.get_num_threads() == wanted


def test_the_launchers_default_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_default(4)
    assert os.environ[VARIABLE] == "3"
    assert share(2) == 6, "a later run of the same program has other processes"
    monkeypatch.setenv(VARIABLE, "5")
    choose_default(4)
    assert (os.environ[VARIABLE], share(2)) == ("5", 5)
