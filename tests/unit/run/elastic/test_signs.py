"""Whether nodes of an elastic run reach each other."""

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rftmega.run.elastic import signs
from rftmega.run.elastic.membership import Member
from rftmega.run.elastic.signs import NEIGHBOURS, Signs, reached


def member(name: str, own: Signs | None = None, port: int = 1) -> Member:
    sign_port = own.port if own else port
    return Member(name, f"token of {name}", "127.0.0.1", 1, sign_port, 2, "config")


def waited(holds: object, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_node_is_reached_only_where_its_own_supervisor_answers() -> None:
    one = Signs("127.0.0.1", "token of one", lease=5)
    assert reached(member("one", one))
    assert not reached(replace(member("one", one), token="token of its successor"))
    one.close()
    assert not reached(member("one", one))


def test_a_node_that_does_not_answer_for_a_lease_is_unreachable_and_one_that_does_is_not() -> None:
    one, other = (Signs("127.0.0.1", f"token of {n}", lease=1.0) for n in ("one", "other"))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        deaf = member("deaf", port=silent.getsockname()[1])
        group = [member("one", one), member("other", other), deaf]
        assert one.watch(group, "one") == ()
        assert waited(lambda: one.watch(group, "one") == ("deaf",))
        assert one.watch(group[:2], "one") == ()
        assert one.watch(group, "one") == (), "a node that comes anew has a whole lease"
    one.close()
    other.close()


def test_a_node_connects_to_few_others_that_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()
    monkeypatch.setattr(signs, "reached", lambda member, **_: not asked.add(member.name))
    one = Signs("127.0.0.1", "token of n08", lease=1.0)
    group = [member(f"n{number:02d}") for number in range(10)]
    one.watch(group, "n08")
    assert waited(lambda: len(asked) >= NEIGHBOURS)
    assert asked == {"n09", "n00", "n01", "n02"}
    assert one.watch(group, "stranger") == ()
    one.close()


def test_an_address_of_another_host_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="assign"):
        Signs("203.0.113.7", "token", lease=1.0)
