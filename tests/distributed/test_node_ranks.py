"""The ranks of one node of an elastic run."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rftmega.core.errors import ConfigError, NodeError, NodeFault
from rftmega.run.elastic import node_ranks
from rftmega.run.elastic.node_ranks import NodeRanks, Outcome
from rftmega.runtime.parallel import preemption

SAVED = 75


def works(folder: Path, kind: str) -> int:
    rank = int(os.environ["RANK"])
    (folder / f"rank {rank}").write_text(f"{os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']}")
    if kind == "refused" and rank == 3:
        raise ConfigError("reward.functions: there is no such file")
    if kind == "fault" and rank == 3:
        raise NodeFault("the port is taken")
    if kind == "host" and rank == 3:
        raise NodeError("its clock is late")
    if kind == "bug" and rank == 3:
        raise ValueError("a bug of rank 3")
    if kind == "killed" and rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exits" and rank == 3:
        os._exit(0)
    if kind == "returns":
        return rank
    while kind != "lasts" or not preemption.asked():
        time.sleep(0.01)
    return SAVED


@pytest.fixture(scope="module")
def ranks() -> Iterator[NodeRanks]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node_ranks, "SETTLE", 0.2)
        found = NodeRanks(2, [])
        yield found
        found.end()


def outcome_of(ranks: NodeRanks) -> Outcome:
    end = time.monotonic() + 60
    while (found := ranks.outcome()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def started(ranks: NodeRanks, folder: Path, kind: str) -> list[psutil.Process]:
    ranks.start({"WORLD_SIZE": "4"}, 2, works, folder, kind)
    end = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and kind == "lasts":
        assert time.monotonic() < end
        time.sleep(0.01)
    return [psutil.Process(rank.pid) for rank in ranks._ranks if psutil.pid_exists(rank.pid or 0)]


def test_ranks_know_their_places_and_the_largest_code_is_that_of_the_node(
    ranks: NodeRanks, tmp_path: Path
) -> None:
    started(ranks, tmp_path, "returns")
    assert outcome_of(ranks) == Outcome(3)
    assert (tmp_path / "rank 2").read_text() == "4 0" and (tmp_path / "rank 3").read_text() == "4 1"
    assert not ranks.running


def test_ranks_are_asked_to_stop_and_return_by_themselves(ranks: NodeRanks, tmp_path: Path) -> None:
    started(ranks, tmp_path, "lasts")
    assert ranks.outcome() is None
    ranks.ask_to_stop()
    assert outcome_of(ranks) == Outcome(SAVED)


@pytest.mark.parametrize(
    ("kind", "said", "trace"),
    [
        ("killed", "was killed by SIGKILL", ""),
        ("bug", "rank 3 died: ValueError: a bug of rank 3", "raise ValueError"),
        ("fault", "rank 3 died: the port is taken", "the port is taken"),
        ("exits", "exited with 0", ""),
        ("host", "its clock is late", ""),
    ],
)
def test_of_a_rank_that_died_the_reason_is_told_and_the_others_are_ended(
    kind: str, said: str, trace: str, ranks: NodeRanks, tmp_path: Path
) -> None:
    processes = started(ranks, tmp_path, kind)
    found = outcome_of(ranks)
    assert found.code is None and found.refusal is None and said in found.reason
    assert trace in found.traces.get("3", "")
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive and not ranks.running


def test_an_error_that_would_occur_again_is_told_as_such(ranks: NodeRanks, tmp_path: Path) -> None:
    started(ranks, tmp_path, "refused")
    found = outcome_of(ranks)
    assert isinstance(found.refusal, ConfigError) and "no such file" in str(found.refusal)


def test_ranks_that_are_ended_leave_no_process_and_no_file(
    ranks: NodeRanks, tmp_path: Path
) -> None:
    processes = started(ranks, tmp_path, "lasts")
    folder = ranks._folder
    assert folder is not None and folder.is_dir()
    ranks.end()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive and not folder.exists()
