"""The lock on a folder: who is refused, what is stale, and that of many takers one wins."""

import errno
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import LockedError
from rftmega.runtime.parallel import folder_lock
from rftmega.runtime.parallel.folder_lock import FILE, FolderLock, Holder, locked

ROOT = Path(__file__).parents[4]
HOLD = """
import sys, time
from rftmega.runtime.parallel.folder_lock import locked
with locked(sys.argv[1], "run"):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def write_lock(folder: Path, **otherwise: Any) -> Path:
    """A lock of a process of another host, or as `otherwise` says."""
    said = {
        "what": "run",
        "host": "node07",
        "machine": "another",
        "pid": 7,
        "started": 1,
        "since": "yesterday",
        "token": "its own",
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    file.write_text(json.dumps(said | otherwise))
    return file


def test_a_live_lock_refuses_and_names_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with (
        another_process(folder) as process,
        pytest.raises(LockedError) as refused,
        locked(folder, "run"),
    ):
        pass
    said = str(refused.value)
    assert (
        f"{folder} is in use by another run, process {process.pid} on {os.uname().nodename}, since 20"
        in said
    )


def test_a_lock_of_a_process_that_was_killed_is_taken_over_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_process(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with caplog.at_level(logging.WARNING), locked(tmp_path, "run"):
            assert f"took over the lock of another run, process {process.pid}" in caplog.text
            assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_nobody_has_waited_for_yet_is_dead(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with locked(tmp_path, "run"):
            pass


def test_another_process_with_the_number_of_a_dead_one_does_not_hold_its_lock(
    tmp_path: Path,
) -> None:
    present = Holder.present("run")
    write_lock(tmp_path, machine=present.machine, pid=os.getpid(), started=present.started - 1)
    with locked(tmp_path, "run"):
        pass


def test_who_is_patient_takes_over_from_a_process_here_that_was_stopped(tmp_path: Path) -> None:
    """A node of an elastic run whose processes stand still has not ended."""
    with another_process(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LockedError, match="in use"):
            FolderLock(tmp_path, "run", stale=0.5).acquire()
        file = tmp_path / FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | {"stale": 1.0}))
        patient = FolderLock(tmp_path, "run", stale=0.2, patient=True)
        begin = time.monotonic()
        patient.acquire()
        assert time.monotonic() - begin > 0.9, "the other is given the time that it asks for"
        patient.release()


def test_who_is_patient_is_refused_by_a_process_here_that_is_alive(tmp_path: Path) -> None:
    holder = FolderLock(tmp_path, "run", beat=0.05)
    holder.acquire()
    with pytest.raises(LockedError, match="in use"):
        FolderLock(tmp_path, "run", stale=5.0, patient=True).acquire()
    holder.release()


def test_within_a_process_the_lock_is_held_once(tmp_path: Path) -> None:
    with locked(tmp_path, "run"), pytest.raises(LockedError), locked(tmp_path, "conversion"):
        pass
    with locked(tmp_path, "conversion"):
        pass


def test_a_lock_of_another_host_is_stale_after_its_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_lock(tmp_path)
    os.utime(file, (time.time() - 61, time.time() - 61))
    with caplog.at_level(logging.WARNING), locked(tmp_path, "run"):
        assert (
            "took over the lock of another run, process 7 on node07, since yesterday, which is dead"
            in caplog.text
        )


def test_a_fresh_lock_of_another_host_is_watched_until_it_beats_or_is_stale(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second comes of a run that died there a moment ago, and starts again here."""
    file, over = write_lock(tmp_path), threading.Event()

    def beat() -> None:
        while not over.wait(0.2):
            os.utime(file)

    other = threading.Thread(target=beat)
    other.start()
    with pytest.raises(LockedError, match="process 7 on node07"):
        FolderLock(tmp_path, "run").acquire()
    over.set()
    other.join()
    lock = FolderLock(tmp_path, "run", stale=1.0)
    with caplog.at_level(logging.INFO):
        lock.acquire()
    lock.release()
    assert "waiting at most 1 s to see it" in caplog.text


def test_ages_are_told_by_the_file_servers_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host's own is a day ahead: the other one's lock is fresh all the same."""
    file, real, over = write_lock(tmp_path), time.time, threading.Event()
    monkeypatch.setattr(time, "time", lambda: real() + 86400)

    def beat() -> None:
        while not over.wait(0.2):
            os.utime(file)

    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(LockedError):
            FolderLock(tmp_path, "run").acquire()
    finally:
        over.set()
        other.join()


def _race(folder: Path, begin: Any, won: Any) -> None:
    lock = FolderLock(folder, "run")
    begin.wait()
    try:
        lock.acquire()
    except LockedError:
        won.put(0)
    else:
        won.put(os.getpid())
    begin.wait()  # none releases before all have tried
    lock.release()


@pytest.mark.parametrize("links", [True, False])
def test_of_many_takers_of_a_stale_lock_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    fork = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        write_lock(folder, machine=Holder.present("run").machine, pid=2**22 + 1)
        begin, won = fork.Barrier(6), fork.Queue()
        takers = [fork.Process(target=_race, args=(folder, begin, won)) for _ in range(6)]
        for taker in takers:
            taker.start()
        winners = [pid for pid in (won.get(timeout=60) for _ in takers) if pid]
        for taker in takers:
            taker.join()
        assert len(winners) == 1
        assert list(folder.iterdir()) == []


def _no_links(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_taker_whose_turn_comes_second_leaves_the_firsts_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, parent, real = Holder.present("run").machine, os.getppid(), os.link
    write_lock(tmp_path, machine=here, pid=2**22 + 1)
    first = write_lock(
        tmp_path / "first", machine=here, pid=parent, started=folder_lock.process_start(parent)
    )

    def link(source: Path, target: Path) -> None:
        if target.suffix == ".turn" and first.exists():
            first.rename(tmp_path / FILE)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(LockedError, match=f"process {parent} on"):
        FolderLock(tmp_path, "run").acquire()
    assert json.loads((tmp_path / FILE).read_text())["pid"] == parent


def test_the_lock_is_touched_while_it_is_held(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "run", beat=0.05)
    lock.acquire()
    os.utime(tmp_path / FILE, (1, 1))
    wait_for(lambda: (tmp_path / FILE).stat().st_mtime > 1)
    lock.release()


def test_a_holder_that_was_taken_for_dead_learns_of_it_and_leaves_the_others_lock(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    lock = FolderLock(tmp_path, "run", beat=0.05, lost=said.append)
    lock.acquire()
    (tmp_path / FILE).unlink()
    wait_for((tmp_path / FILE).exists)  # somebody deleted it: it is back
    assert said == []
    draft = write_lock(tmp_path / "draft")
    os.replace(draft, tmp_path / FILE)
    wait_for(lambda: bool(said))
    assert "process 7 on node07" in said[0] and "has taken over the lock" in said[0]
    lock.release()
    assert json.loads((tmp_path / FILE).read_text())["pid"] == 7


def test_a_process_whose_lock_was_taken_over_ends_by_itself(tmp_path: Path) -> None:
    program = HOLD.replace(
        "with locked",
        "from rftmega.runtime.parallel import folder_lock\nfolder_lock.BEAT_SECONDS = 0.05\nwith locked",
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        os.replace(write_lock(tmp_path / "draft"), tmp_path / FILE)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert "has taken over the lock" in said


def test_a_copy_by_fork_releases_nothing(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "run")
    lock.acquire()
    child = multiprocessing.get_context("fork").Process(target=lock.release)
    child.start()
    child.join()
    assert (tmp_path / FILE).exists()
    lock.release()
    assert not (tmp_path / FILE).exists()


def test_a_folder_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(LockedError, match=f"{folder} can't be used"):
            FolderLock(folder, "run").acquire()


def test_a_lost_answer_of_the_file_server_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a request whose answer got lost; the second link() finds the first one's."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))

    monkeypatch.setattr(os, "link", link)
    with locked(tmp_path, "run"):
        assert folder_lock.Holder(**json.loads((tmp_path / FILE).read_text())).pid == os.getpid()


def wait_for(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_taker_that_died_in_its_turn_keeps_nobody_out(tmp_path: Path) -> None:
    write_lock(tmp_path, machine=Holder.present("run").machine, pid=2**22 + 1)
    turn = tmp_path / f"{FILE}.turn"
    turn.write_text("")
    os.utime(turn, (time.time() - 61, time.time() - 61))
    with locked(tmp_path, "run"):
        assert not turn.exists()
