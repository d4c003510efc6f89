"""The folder through which nodes of an elastic run know of each other."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rftmega.run.elastic.membership import Member, Membership, Round, new_token


def membership(folder: Path, name: str, lease: float = 5.0) -> Membership:
    found = Membership(folder, Member(name, new_token(), "127.0.0.1", 1, 2, 2, "c"), lease=lease)
    found.join()
    return found


def proposed(number: int, by: str) -> Round:
    return Round(number, ((by, "token"),), 2, "c", {"parallel.tensor": 2}, "127.0.0.1", 7, by)


def test_of_many_that_create_the_same_round_one_succeeds_and_all_see_its_round(
    tmp_path: Path,
) -> None:
    nodes = [membership(tmp_path, f"n{number}") for number in range(16)]
    for number in (1, 2):
        with ThreadPoolExecutor(16) as pool:
            created = list(
                pool.map(lambda node: node.begin(proposed(number, node.member.name)), nodes)  # noqa: B023
            )
        assert sum(created) == 1
        winner = nodes[created.index(True)].member.name
        assert all(node.newest() == proposed(number, winner) for node in nodes)
    assert not [path for path in (tmp_path / "rounds").iterdir() if path.suffix != ".json"]


def test_a_node_without_a_sign_for_a_lease_is_silent_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = membership(tmp_path, "one"), membership(tmp_path, "other")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert set(one.look().alive) == {"one", "other"}
    file = tmp_path / "members/other.json"
    touched = file.stat().st_mtime
    os.utime(file, (touched - 6, touched - 6))
    seen = one.look()
    assert set(seen.alive) == {"one"} and seen.silent["other"] == pytest.approx(6, abs=1)
    other.touch()
    assert set(one.look().alive) == {"one", "other"}


def test_what_a_node_says_of_itself_is_what_others_read(tmp_path: Path) -> None:
    one, other = membership(tmp_path, "one"), membership(tmp_path, "other")
    other.tell(state="failed", round=3, reason="rank 1 died", unreachable=("x", "y"), leaving=True)
    assert one.look().alive["other"] == other.member
    assert other.member.unreachable == ("x", "y")


def test_the_end_of_an_earlier_start_does_not_end_a_node_that_joined_later(tmp_path: Path) -> None:
    first = membership(tmp_path, "first")
    first.finish(75, "asked to stop")
    assert first.look().end == (75, "asked to stop")
    end = tmp_path / "end.json"
    os.utime(end, (end.stat().st_mtime - 10,) * 2)
    later = membership(tmp_path, "later")
    assert later.look().end is None
    later.finish(0, "finished")
    assert later.look().end == (0, "finished")


def test_an_end_after_the_start_of_all_nodes_counts_for_one_that_joins_after_it(
    tmp_path: Path,
) -> None:
    """A supervisor that was started again while the run ended."""
    began = tmp_path / "began"
    began.write_text("")
    membership(tmp_path, "first").finish(76, "diverged")
    os.utime(began, (began.stat().st_mtime - 60,) * 2)
    late = Membership(tmp_path, Member("late", "t", "h", 1, 2, 2, "c"), lease=5.0, began=began)
    late.join()
    assert late.look().end == (76, "diverged")


def test_what_could_not_be_told_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = membership(tmp_path, "one"), membership(tmp_path, "other")

    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="space"):
            one.tell(state="failed", round=2)
    assert other.look().alive["one"].state == "ready"
    one.look()
    assert other.look().alive["one"].state == "failed"


def test_a_round_is_created_once_without_hard_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    one = membership(tmp_path, "one")
    assert one.begin(proposed(1, "one")) and not one.begin(proposed(1, "other"))
    assert one.newest() == proposed(1, "one")


def test_an_end_leaves_no_lease_of_failed_nodes_behind(tmp_path: Path) -> None:
    one, _ = membership(tmp_path, "one"), membership(tmp_path, "gone")
    os.utime(tmp_path / "members/gone.json", (1, 1))
    one.finish(0, "finished")
    one.leave()
    assert not list((tmp_path / "members").iterdir())


def test_a_supervisor_knows_that_another_took_its_name_and_leaves_its_lease_alone(
    tmp_path: Path,
) -> None:
    one = membership(tmp_path, "same")
    assert not one.replaced()
    other = membership(tmp_path, "same")
    assert one.replaced() and not other.replaced()
    one.leave()
    assert set(other.look().alive) == {"same"}


def test_a_request_to_stop_is_of_its_round_alone(tmp_path: Path) -> None:
    one = membership(tmp_path, "one")
    one.begin(proposed(1, "one"))
    one.ask_to_stop(1, "two joins")
    assert one.look().stop == "two joins"
    one.begin(proposed(2, "one"))
    assert one.look().stop == ""


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"name": 3}', "\x00" * 50])
def test_a_damaged_file_is_nobody_s_lease_and_no_end(tmp_path: Path, content: Any) -> None:
    one = membership(tmp_path, "one")
    (tmp_path / "members/damaged.json").write_text(content)
    (tmp_path / "end.json").write_text(content)
    seen = one.look()
    assert set(seen.alive) == {"one"} and seen.end is None and seen.round is None


def test_the_newest_round_is_that_of_the_highest_number(tmp_path: Path) -> None:
    one = membership(tmp_path, "one")
    for number in (9, 10, 11):
        one.begin(proposed(number, "one"))
    newest = one.newest()
    assert newest is not None and newest.number == 11
