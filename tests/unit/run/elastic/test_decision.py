"""What an elastic run does next, for what its nodes see."""

from dataclasses import replace
from typing import Any

import pytest

from rftmega.run.elastic.decision import (
    Begin,
    Finish,
    NodeLimits,
    Stop,
    Wait,
    decide,
    leads,
    may_leave,
    problem,
    reaching,
)
from rftmega.run.elastic.membership import (
    ENDED,
    FAILED,
    FINISHED,
    READY,
    RUNNING,
    STOPPED,
    ClusterView,
    Member,
    Round,
)

REQUEUE = 75


def member(name: str, state: str = READY, number: int = 0, **settings: Any) -> Member:
    return Member(
        name, f"token of {name}", "127.0.0.1", 1, 2, 2, "config", number, state, **settings
    )


def in_round(names: str, number: int = 1, failures: int = 0) -> Round:
    members = tuple((name, f"token of {name}") for name in names)
    return Round(number, members, 2, "config", {}, "127.0.0.1", 1, "why", failures)


def seen(
    *members: Member, of: Round | None = None, stop: str = "", silent: str = ""
) -> ClusterView:
    alive = {each.name: each for each in sorted(members, key=lambda each: each.name)}
    return ClusterView(alive, dict.fromkeys(silent, 12.0), of, stop)


def decided(
    found: ClusterView, least: int = 1, most: int = 4, *, settled: bool = True, **given: Any
) -> Any:
    return decide(found, NodeLimits(least, most), settled=settled, requeue_code=REQUEUE, **given)


def test_a_run_begins_with_all_nodes_or_with_enough_when_no_more_come() -> None:
    two = seen(member("b"), member("a"))
    assert decided(two, 2, 2, settled=False) == Begin(("a", "b"), "the run begins")
    assert isinstance(decided(two, 2, 3, settled=False), Wait)
    assert decided(two, 2, 3) == Begin(("a", "b"), "the run begins")
    assert isinstance(decided(two, 3, 4), Wait)


def test_a_run_begins_with_nodes_that_reach_each_other() -> None:
    apart = seen(member("a"), member("b", unreachable=("c",)), member("c"))
    assert decided(apart, 2).candidates == ("a", "b")
    assert isinstance(decided(apart, 3), Wait)


def test_a_round_without_a_problem_goes_on() -> None:
    now = in_round("ab")
    running = seen(member("a", RUNNING, 1), member("b", RUNNING, 1), of=now)
    assert decided(running) == Wait() and problem(running) == ""
    not_yet = seen(member("a", RUNNING, 1), member("b"), of=now)
    assert decided(not_yet) == Wait()


def test_after_the_loss_of_a_node_the_others_go_on_once_their_ranks_have_ended() -> None:
    now = in_round("abc")
    left = member("b", RUNNING, 1), member("c", ENDED, 1, reason="a is gone")
    early = seen(*left, of=now, silent="a")
    assert problem(early) == "a gave no sign of life for 12 s"
    assert isinstance(decided(early), Wait)
    ready = seen(replace(left[0], state=ENDED), left[1], of=now, silent="a")
    assert decided(ready) == Begin(("b", "c"), "a gave no sign of life for 12 s")
    assert isinstance(decided(ready, least=3), Wait)


def test_a_node_that_was_started_again_is_not_the_one_that_was_in_the_round() -> None:
    again = replace(member("a"), token="another")
    found = seen(again, member("b", ENDED, 1, reason="gone"), of=in_round("ab"))
    assert problem(found) == "a was started again"
    assert decided(found) == Begin(("a", "b"), "a was started again")


def test_a_lease_that_comes_back_after_others_have_given_the_round_up_does_not_keep_it() -> None:
    """Else the one would wait for ranks that have ended."""
    found = seen(
        member("a", RUNNING, 1), member("b", ENDED, 1, reason="a was silent"), of=in_round("ab")
    )
    assert problem(found) == "b: a was silent"
    assert isinstance(decided(found), Wait)


def test_failures_without_a_new_checkpoint_end_the_run() -> None:
    failed = member("a", FAILED, 4, reason="rank 0 died"), member("b", ENDED, 4, reason="a failed")
    assert decided(seen(*failed, of=in_round("ab", 4, failures=1))) == Begin(
        ("a", "b"), "a: rank 0 died", failed=True
    )
    last = decided(seen(*failed, of=in_round("ab", 4, failures=2)))
    assert isinstance(last, Finish) and last.code == 1 and "rank 0 died" in last.message
    since = decided(seen(*failed, of=in_round("ab", 4, failures=2)), progressed=True)
    assert since == Begin(("a", "b"), "a: rank 0 died", failed=True)
    # whose rank died of the loss of another
    died = member("b", FAILED, 4, reason="connection closed")
    lost = seen(died, of=in_round("ab", 4, failures=2), silent="a")
    assert decided(lost) == Begin(("b",), "a gave no sign of life for 12 s")


def test_a_new_node_is_taken_in_where_there_is_room_and_a_layout() -> None:
    running = member("b", RUNNING, 2), member("a"), member("c", RUNNING, 2)
    found = seen(*running, of=in_round("bc", 2))
    assert decided(found, most=3) == Stop("a joins")
    assert decided(found, most=2) == Wait()
    assert decided(found, most=3, usable=lambda nodes: 2) == Wait()
    assert decided(found, most=3, tried=["b", "c"]) == Wait()
    cut_off = seen(replace(running[0], unreachable=("a",)), *running[1:], of=in_round("bc", 2))
    assert decided(cut_off, most=3) == Wait()
    asked = replace(found, stop="a joins")
    assert decided(asked, most=3) == Wait()


def test_once_all_have_stopped_the_next_round_has_the_new_node() -> None:
    stopped = member("b", STOPPED, 2), member("c", RUNNING, 2), member("a")
    found = seen(*stopped, of=in_round("bc", 2), stop="a joins")
    assert decided(found, most=3) == Wait()
    done = seen(
        stopped[0], member("c", STOPPED, 2), stopped[2], of=in_round("bc", 2), stop="a joins"
    )
    assert decided(done, most=3) == Begin(("b", "c", "a"), "a joins")


def test_a_node_that_leaves_is_let_go_and_the_run_with_the_last_one_ends_to_be_started_again() -> (
    None
):
    now = in_round("ab")
    going = seen(member("a", RUNNING, 1, leaving=True), member("b", RUNNING, 1), of=now)
    assert decided(going) == Stop("a leaves")
    gone = seen(
        member("a", STOPPED, 1, leaving=True), member("b", STOPPED, 1), of=now, stop="a leaves"
    )
    assert decided(gone) == Begin(("b",), "a leaves")
    alone = seen(member("a", STOPPED, 1, leaving=True), of=in_round("a"), stop="a leaves")
    assert decided(alone) == Finish(REQUEUE, "all nodes were asked to end")
    before = seen(member("a", leaving=True))
    assert decided(before).code == REQUEUE


def test_the_run_is_over_when_the_first_rank_s_node_has_finished() -> None:
    now = in_round("ba")
    assert decided(seen(member("a", FINISHED, 1), member("b", RUNNING, 1), of=now)) == Wait()
    lost = seen(member("a", FINISHED, 1), of=now, silent="b")
    assert decided(lost) == Begin(("a",), "b gave no sign of life for 12 s"), "b exports"
    over = seen(member("a", RUNNING, 1), member("b", FINISHED, 1), of=now)
    assert decided(over) == Finish(0, "finished")


def test_nodes_that_do_not_reach_each_other_are_not_in_one_round() -> None:
    now = in_round("abc")
    ended = [
        member(name, ENDED, 1, reason="cut", unreachable=("a",) * (name != "a")) for name in "abc"
    ]
    found = seen(*ended, of=now)
    assert problem(found) == "a: cut"
    assert decided(found).candidates == ("b", "c")
    running = seen(*(replace(each, state=RUNNING) for each in ended), of=now)
    assert problem(running) == "a and b can't reach each other"


@pytest.mark.parametrize("extra", [0, 12])
def test_the_most_nodes_that_reach_each_other_go_on(extra: int) -> None:
    """With more nodes than all sets of which can be compared, too."""
    names = ["a", "b", "c", "d", *(f"n{number:02d}" for number in range(extra))]
    alive = {name: member(name) for name in names}
    alive["a"] = member("a", unreachable=("b", "c"))
    alive["d"] = member("d", unreachable=("a",))
    assert reaching(names, alive) == [name for name in names if name != "a"]


def test_the_first_living_node_of_the_round_leads() -> None:
    found = seen(member("a"), member("c", RUNNING, 1), of=in_round("bc"))
    assert leads("c", found) and not leads("a", found)
    assert leads("a", seen(member("a"), member("b")))


def test_a_node_that_was_asked_to_leave_goes_when_nobody_needs_it() -> None:
    leaver = member("b", STOPPED, 1, leaving=True)
    now = in_round("ab")
    assert not may_leave("b", seen(member("a", RUNNING, 1), leaver, of=now)), (
        "the others still save"
    )
    assert may_leave("b", seen(member("a", STOPPED, 1), leaver, of=now))
    assert may_leave("b", seen(member("a", RUNNING, 2), leaver, of=in_round("a", 2)))
    assert may_leave("b", seen(member("a"), replace(leaver, round=0))), "before the first round"
    assert not may_leave("b", seen(leaver, of=now)), "the last one ends the run"
