"""When a process counts as slow, and how often that is said."""

import socket
from types import SimpleNamespace

import pytest

from rftmega.monitoring.performance import stragglers as module
from rftmega.monitoring.performance.stragglers import AGAIN, Straggler, Stragglers, stragglers


def step(
    *, slowest: float = 40.0, median: float = 4.0, rollout: float = 50.0, rank: int = 2
) -> dict[str, float]:
    """A step whose update took as long as its slowest process, `rank`; score has no work of its
    own.
    """
    return {
        "seconds_rollout": rollout,
        "work_rollout": rollout,
        "work_rollout_median": rollout,
        "work_rollout_max": rollout,
        "work_rollout_slowest": 0.0,
        "seconds_score": 1.0,
        "seconds_update": slowest,
        "work_update": 2 * median,
        "work_update_median": median,
        "work_update_max": slowest,
        "work_update_slowest": float(rank),
    }


def test_slow_is_who_works_for_several_times_the_median_where_it_costs_a_part_of_the_step() -> None:
    assert stragglers(step()) == [Straggler("update", 2)]
    assert stragglers(step(median=14.0)) == [], "less than three times"
    assert stragglers(step(rollout=400.0)) == [], "36 s of 441"
    assert stragglers({"seconds_update": 9.0, "loss": 1.0}) == [], "nothing was measured"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stragglers:
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module, "gather_objects", lambda mine: ["a", "b", mine])
    watch = Stragglers()
    watch.on_start(None, {})
    return watch


def test_it_is_said_of_the_third_step_in_a_row_and_then_once_in_a_hundred(
    watch: Stragglers, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for number in range(1, 2 * AGAIN):
        watch.on_step(SimpleNamespace(step=number), step(median=14.0) if number == 2 else step())
        said += [number] * bool(caplog.messages)
        assert [f"rank 2 on {socket.gethostname()} is slow: in update it worked for 40.0 s, the median process for 4.0 s;"
                in message for message in caplog.messages] in ([], [True])  # fmt: skip
        caplog.clear()
    assert said == [5, 5 + AGAIN]


def test_ranks_that_are_slow_in_turn_are_nobodys_fault(
    watch: Stragglers, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 20):
        watch.on_step(SimpleNamespace(step=number), step(rank=number % 3))
    assert not caplog.messages


def test_the_other_processes_say_nothing(
    watch: Stragglers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.dist, "get_rank", lambda: 1)
    for number in range(1, 9):
        watch.on_step(SimpleNamespace(step=number), step())
    assert not caplog.messages
