"""The launcher of `--processes`: whichever rank fails, its user hears why."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rftmega.core.errors import ConfigError, NodeFault, RFTMegaError
from rftmega.run.local_launcher import launch, run_rank
from rftmega.runtime import device  # noqa: F401  of the programs below
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.orphans import end_with_parent

ROOT = Path(__file__).parents[2]


def fails(rank: str, kind: str) -> int:
    sys.stderr.write(f"start of rank {os.environ['RANK']}\n")
    if os.environ["RANK"] == rank:
        if kind == "user":
            raise ConfigError("choose another")
        if kind == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "fault" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise NodeFault("the port is taken")
        if kind == "bug":
            raise ValueError("boom")
    return 0


def waits_for_a_request() -> int:
    """Until this process or the launcher was asked to stop."""
    with preemption.listening():
        sys.stdout.write(f"{os.getpid()}\n")
        while not preemption.asked():
            time.sleep(0.05)
    return 85


def collects_its_imports() -> int:
    return int(gc.get_freeze_count() < 1000)


def is_killed_with_a_semaphore() -> int:
    held = multiprocessing.get_context("spawn").Semaphore()
    os.kill(os.getpid() if held else 0, signal.SIGKILL)
    return 0


def is_asked_at_once() -> int:
    """Before it could do anything about it."""
    signal.raise_signal(signal.SIGUSR1)
    return 85 if preemption.asked() else 0


@contextmanager
def launching(call: str) -> Iterator["subprocess.Popen[str]"]:
    """In a session of its own, which is gone at the end."""
    process = subprocess.Popen([sys.executable, "-c", program_of(call)], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                               start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def program_of(call: str) -> str:
    return f"import sys\nfrom rftmega.run.local_launcher import launch\nfrom {__name__} import *\nsys.exit({call})"


def launched(call: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: ranks write where the server that they are forked from was started
    to write.
    """
    command = [sys.executable, "-c", program_of(call)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.ranks), "1"])
def test_what_the_user_can_mend_is_raised_here_whichever_rank_found_it(rank: str) -> None:
    with pytest.raises(RFTMegaError, match="choose another"):
        launch(2, fails, rank, "user", preload=[])


@pytest.mark.ranks
def test_collections_in_ranks_do_not_look_at_what_they_are_forked_with() -> None:
    assert launch(2, collects_its_imports, preload=[]) == 0


@pytest.mark.ranks
def test_anything_else_is_a_traceback_with_the_rank_before_it() -> None:
    done = launched("launch(3, fails, '1', 'bug', preload=[])")
    assert done.returncode == 1
    assert "[rank 1] ValueError: boom" in done.stderr
    assert "error: rank 1 (pid" in done.stderr
    assert "exited with 1; the other ranks were ended" in done.stderr


def test_what_killed_ranks_leave_is_removed_without_a_word() -> None:
    done = launched("launch(1, is_killed_with_a_semaphore, preload=[])")
    assert "was killed by SIGKILL" in done.stderr
    assert "resource_tracker" not in done.stderr


@pytest.mark.ranks
def test_ranks_start_again_when_one_was_killed() -> None:
    done = launched("launch(2, fails, '1', 'once', preload=[], max_restarts=3)")
    assert done.returncode == 0, done.stderr
    assert (
        "was killed by SIGKILL; the other ranks were ended, all start again (1 of 3)" in done.stderr
    )
    assert done.stderr.count("start of rank 1") == 2


@pytest.mark.ranks
def test_ranks_start_again_after_a_fault_that_may_pass() -> None:
    done = launched("launch(2, fails, '0', 'fault', preload=[], max_restarts=1)")
    assert done.returncode == 0, done.stderr
    assert "[rank 0] the port is taken" in done.stderr and "all start again (1 of 1)" in done.stderr


@pytest.mark.ranks
def test_restarts_have_an_end_and_what_the_user_can_mend_has_none() -> None:
    done = launched("launch(2, fails, '0', 'bug', preload=[], max_restarts=1)")
    assert done.returncode == 1
    assert done.stderr.count("[rank 0] ValueError: boom") == 2
    assert "all start again (1 of 1)" in done.stderr and "this is the end" in done.stderr
    done = launched("launch(1, fails, '0', 'user', preload=[], max_restarts=3)")
    assert done.stderr.count("start of rank 0") == 1


@pytest.mark.parametrize(
    ("asked", "whom"),
    [
        pytest.param(signal.SIGTERM, "the launcher", marks=pytest.mark.ranks),
        pytest.param(signal.SIGUSR1, "all its processes", marks=pytest.mark.ranks),
    ],
)
def test_a_request_to_stop_reaches_ranks_that_end_by_themselves(
    asked: signal.Signals, whom: str
) -> None:
    """Slurm may signal the first process of a step, or all of them: the server that ranks are
    forked from too.
    """
    with launching(
        f"launch(2, waits_for_a_request, preload=[{__name__!r}], stops=True)"
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        if whom == "the launcher":
            process.send_signal(asked)
        else:
            os.killpg(process.pid, asked)
        # as Slurm at the end of the time: it must not break off what has begun
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 85


def test_a_rank_hears_a_request_from_its_first_moment_where_runs_can_be_stopped() -> None:
    both = [f"launch(1, is_asked_at_once, preload=[], stops={stops})" for stops in (True, False)]
    done = launched(f"str([{', '.join(both)}])")
    assert "[85, 1]" in done.stderr
    assert "was killed by SIGUSR1" in done.stderr


@pytest.mark.ranks
def test_ctrl_c_ends_ranks_that_listen_for_requests_at_once() -> None:
    with launching("launch(2, waits_for_a_request, preload=[], stops=True)") as process:
        assert process.stdout is not None
        ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert not psutil.wait_procs(ranks, timeout=5)[1]


def stands_still() -> int:
    """Deaf to requests, as a rank in a collective whose peers are gone."""
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    time.sleep(600)
    return 0


FORKED = f"launch(2, stands_still, preload=[{__name__!r}], stops=True)"
SPAWNED = f"(setattr(type(device.current()), 'start_method', 'spawn'), {FORKED})[1]"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(FORKED, id="forked, as on a CPU"),
        pytest.param(SPAWNED, id="spawned, as on CUDA", marks=pytest.mark.ranks),
    ],
)
def test_ranks_end_with_a_launcher_that_is_killed(call: str) -> None:
    with launching(call) as process:
        assert process.stdout is not None
        ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert not psutil.wait_procs([*ranks, *below], timeout=10)[1]


def test_a_rank_whose_launcher_was_killed_before_it_began_ends_at_once() -> None:
    """The server of its forks may be there a moment longer."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    child = multiprocessing.get_context("fork").Process(
        target=run_rank, args=((gone.pid, 1), Path(), 0, False, stands_still)
    )
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("parent", ["of now", "of before"])
def test_a_process_that_ends_with_its_parent_looks_whether_it_is_still_there(parent: str) -> None:
    pid = os.getpid() if parent == "of now" else 2**22 + 1
    child = multiprocessing.get_context("fork").Process(
        target=end_with_parent, args=(pid, signal.SIGKILL)
    )
    child.start()
    child.join(30)
    assert child.exitcode == (0 if parent == "of now" else -signal.SIGKILL)


@pytest.mark.ranks
def test_a_rank_of_torchrun_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "from rftmega.run import api\n"
        "from tests.distributed.test_local import stands_still\n"
        "api.end_with_torchrun()\n"
        "stands_still()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline()))
        process.kill()
        assert not psutil.wait_procs([rank], timeout=10)[1]
