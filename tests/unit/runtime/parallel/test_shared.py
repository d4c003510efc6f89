"""Memory under a name: what a request can name, and that nothing else is opened, made or enlarged."""

import fcntl
import multiprocessing
import os
import re
import stat
from pathlib import Path

import pytest

from rftmega.runtime.parallel import shared

SIZE = 8192


def writes(name: str) -> None:
    shared.attach(name, SIZE)[:4] = b"push"


def test_processes_share_what_one_of_them_made_and_nothing_is_left_in_a_folder() -> None:
    before = set(os.listdir("/dev/shm"))
    name = shared.create(SIZE)
    assert set(os.listdir("/dev/shm")) == before
    other = multiprocessing.get_context("fork").Process(target=writes, args=(name,))
    other.start()
    other.join()
    assert other.exitcode == 0
    assert shared.attach(name, SIZE)[:6] == b"push\0\0"
    descriptor = int(name.split("-")[2])
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 2 * SIZE)
    os.close(descriptor)


def named(descriptor: int, token: str = "0" * 32) -> str:
    return f"rftmega-{os.getpid()}-{descriptor}-{token}"


def test_what_is_no_name_of_such_memory_is_refused_and_nothing_is_made_or_enlarged(
    tmp_path: Path,
) -> None:
    victim, missing = tmp_path / "victim", tmp_path / "missing"
    victim.write_bytes(b"thesis")
    name = shared.create(SIZE)
    _, pid, descriptor, token = name.split("-")
    small, unsealed = shared.create(1), os.memfd_create(f"rftmega-{'0' * 32}")
    os.ftruncate(unsealed, SIZE)
    with victim.open("r+b") as opened:
        refused = {
            str(victim): "no name",
            str(missing): "no name",
            f"../{name}": "no name",
            f"{name}\n": "no name",
            f"/proc/{pid}/fd/{descriptor}": "no name",
            name.replace(token, "0" * 32): "other memory",
            named(opened.fileno()): "other memory",
            f"rftmega-{2**22 + 1}-{descriptor}-{token}": "can't be opened",
            small: f"not memory of this user, of {SIZE} bytes",
            named(unsealed): "not sealed",
        }
        for text, reason in refused.items():
            with pytest.raises(ValueError, match=re.escape(reason)):
                shared.attach(text, SIZE)
    assert victim.read_bytes() == b"thesis" and not missing.exists()
    for each in (int(descriptor), int(small.split("-")[2]), unsealed):
        os.close(each)


def test_memory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = shared.create(SIZE)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="not memory of this user"):
        shared.attach(name, SIZE)
    os.close(int(name.split("-")[2]))


def test_a_pipe_that_has_the_number_by_now_is_not_opened() -> None:
    """Opening one would wait for its other end, or be taken for it."""
    name = shared.create(SIZE)
    descriptor = int(name.split("-")[2])
    os.close(descriptor)
    ends = os.pipe()
    assert descriptor in ends and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    with pytest.raises(ValueError, match="other memory"):
        shared.attach(name, SIZE)
    for end in ends:
        os.close(end)


def test_the_seals_hold_against_whoever_opens_it() -> None:
    name = shared.create(SIZE)
    descriptor = int(name.split("-")[2])
    assert (
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        == fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    )
    os.close(descriptor)
