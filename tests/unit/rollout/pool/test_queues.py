"""Who gets what no engine has begun, without processes."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.core.errors import EngineFault
from rftmega.rollout.pool.announcements import Announcements
from rftmega.rollout.pool.request_queues import Counted, Dealt
from rftmega.rollout.requests.order import RequestOrder

ORDER = RequestOrder([[0, 1], [2]], [[3, 4], [5], [6, 7, 8], [9]])


def counted(board: Any, mine: int) -> Counted:
    queue = Counted(ORDER, mine, board=board, name="count")
    queue.begin()
    return queue


def test_each_piece_goes_to_the_engine_that_asks_first_and_to_no_other() -> None:
    board = dist.HashStore()
    first, second = counted(board, 0), counted(board, 1)
    assert first.take(1) == [3, 4], "a piece stays whole"
    assert second.take(2) == [5, 6, 7, 8]
    assert not first.empty
    assert first.take(3) == [9]
    assert first.empty and not second.empty
    assert second.take(9) == [] and second.empty
    assert (first.given, second.given) == ([0, 1, 3, 4, 9], [2, 5, 6, 7, 8])


def said_by(board: Any, *, speaks: bool) -> Announcements:
    found = Announcements(board, "this", speaks=speaks)
    found.begin()
    return found


def test_a_process_hears_what_the_first_of_its_engine_said_in_its_order() -> None:
    board = dist.HashStore()
    leader, follower = said_by(board, speaks=True), said_by(board, speaks=False)
    for thing in ([[3, None, 7]], [], {"every": True}):
        leader.say(thing)
    assert [follower.receive() for _ in range(3)] == [[[3, None, 7]], [], {"every": True}]


def test_a_process_waits_for_the_first_of_its_engine_and_hears_that_it_broke_down() -> None:
    board = dist.HashStore()
    leader, follower = said_by(board, speaks=True), said_by(board, speaks=False)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(EngineFault) as raised:
            follower.receive()
        said.append(str(raised.value))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "it did not wait"
    leader.broke()
    waiting.join(10)
    assert said == ["The first process of this engine broke down."]
    for one in (leader, follower):
        # the engine has started again, and its first process has not broken down since
        one.begin()
    leader.say("again")
    assert follower.receive() == "again"


def test_a_generation_leaves_nothing_at_the_board() -> None:
    board = dist.HashStore()
    empty = board.num_keys()
    first, second = counted(board, 0), counted(board, 1)
    leader, follower = said_by(board, speaks=True), said_by(board, speaks=False)
    first.take(1)
    leader.say([3, 4])
    leader.broke()
    assert board.num_keys() == empty + 3, "the count, what was said and the fault"
    for one in (first, second, leader, follower):
        one.end()
    assert board.num_keys() == empty


def test_pieces_are_dealt_alike_everywhere_to_engines_with_room_the_emptiest_first() -> None:
    queues = [Dealt(ORDER, mine, slots=2) for mine in range(2)]
    for queue in queues:
        queue.begin()
    first, second = queues
    assert [queue.room(answered=0, lately=0) for queue in queues] == [0, 1]
    assert [queue.deal([0, 1]) for queue in queues] == [True, True]
    assert (first.waiting, second.waiting) == (False, True)
    assert second.take(1) == [3] and second.waiting
    assert second.take(5) == [4] and not second.waiting
    assert first.room(answered=2, lately=2) == 4, "two places are free, and two more will be soon"
    assert [queue.deal([4, 1]) for queue in queues] == [True, True]
    assert first.given == [0, 1, 5, 6, 7, 8], "the last one with room gets a piece that is larger"
    assert second.given == [2, 3, 4, 9]
    assert first.take(9) == [5, 6, 7, 8] and first.empty
    assert [queue.deal([9, 9]) for queue in queues] == [False, False], "nothing is left"


def test_what_was_given_before_an_engine_broke_down_is_asked_for_once_more_and_not_dealt_again() -> (
    None
):
    queue = Dealt(ORDER, 1, slots=2)
    queue.begin()
    queue.deal([0, 2])
    queue.begin()  # of all that is given
    assert queue.take(9) == [] and not queue.waiting
    assert queue.given == [2, 3, 4]
