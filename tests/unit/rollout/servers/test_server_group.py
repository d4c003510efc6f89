"""What a fleet makes of servers elsewhere; their faults in runs are in tests/server_chaos.py."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import EngineError, EngineFault
from rftmega.rollout.servers import server_client
from rftmega.rollout.servers import server_group as server_group_module
from rftmega.rollout.servers.protocol import http_reply
from rftmega.rollout.servers.protocol.http_reply import HTTPReply
from rftmega.rollout.servers.server_client import ServerClient
from rftmega.rollout.servers.server_group import ServerGroup, ServerGroupMember

absent = set[str]()  # addresses where nobody answers


class Elsewhere:
    """A server that somebody else starts: `start` changes with each."""

    own = False

    def __init__(self, address: str):
        self.address, self.start = address, "first"

    def there(self) -> bool:
        return self.address not in absent

    def probe(self, *, paused: bool) -> None: ...

    def close(self) -> None: ...

    def identity(self) -> str:
        return f"{self.address}, {self.start}"


def server_group_of(*addresses: str, server_list: str | Path = "") -> ServerGroup:
    def none_of_ours(number: int) -> Any:
        raise AssertionError(number)

    client: Any = Elsewhere
    return ServerGroup(none_of_ours, client=client, addresses=addresses, server_list=server_list)


def server_group_of_one() -> tuple[ServerGroup, ServerGroupMember, Any]:
    """Returns a fleet whose server has the newest weights and has just failed a request."""
    server_group = server_group_of("http://10.0.0.2:8100")
    server_group.renew()
    (member,) = server_group.members
    member.health.landed()
    member.health.failed()
    return server_group, member, member.server


def test_a_server_elsewhere_that_answers_a_probe_is_healthy_again() -> None:
    server_group, member, _ = server_group_of_one()
    server_group.probe(member)
    assert server_group.healthy == [member.server]


def test_a_server_elsewhere_that_was_started_again_is_stale_when_it_answers_a_probe() -> None:
    server_group, member, server = server_group_of_one()
    server.start = "second"
    server_group.probe(member)
    assert member.state == "stale"
    server_group.renew()
    member.health.landed()
    assert (member.health.starts, server_group.healthy) == (2, [server])


def test_a_server_that_was_started_again_and_failed_no_request_is_stale_at_the_next_push() -> None:
    server_group, member, server = server_group_of_one()
    member.health.probed(True)
    server.start = "second"
    server_group.renew()
    assert (member.state, member.health.starts) == ("stale", 2)


def test_between_pushes_servers_come_and_leave_and_those_that_answer_are_left_alone(
    tmp_path: Path,
) -> None:
    server_list = tmp_path / "server_list"
    server_list.write_text("http://a:1\n")
    server_group = server_group_of(server_list=server_list)
    server_group.renew()
    server_group.members[0].health.landed()
    server_group.members[0].server.start = "second"  # type: ignore[attr-defined]
    server_list.write_text("http://a:1\nhttp://b:1\n")
    assert server_group.late == [] and len(server_group.members) == 1
    server_group.find_remote_servers()
    assert [each.server.address for each in server_group.late] == ["http://b:1"]
    assert server_group.healthy == [server_group.members[0].server], "it was looked at"
    server_group.late[0].health.landed()
    server_list.write_text("http://b:1\n")
    server_group.pushing = True
    server_group.find_remote_servers()
    assert len(server_group.healthy) == 2, "one left while weights were brought"
    server_group.pushing = False
    server_group.find_remote_servers()
    assert [each.address for each in server_group.healthy] == [
        "http://b:1"
    ] and server_group.late == []
    with pytest.raises(EngineFault, match="server-0-start-1 has left"):
        server_group.named("server-0-start-1")


def test_a_trainer_that_is_there_first_waits_for_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server_group_module.time,
        "sleep",
        lambda seconds: server_list.write_text("http://10.0.0.3:8100\n"),
    )
    server_list = tmp_path / "servers.txt"
    server_group = server_group_of(server_list=server_list)
    server_group.wait()
    assert [member.server.address for member in server_group.reachable] == ["http://10.0.0.3:8100"]


@pytest.mark.parametrize(("status", "fault"), [(200, False), (500, True), (404, True)])
def test_a_paused_server_answers_a_probe_only_where_its_engine_does(
    status: int, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's front end answers 500 where its engine is dead."""
    server = ServerClient("http://10.0.0.2:8100", {})
    reply = HTTPReply(status, b'{"is_paused": true}')
    monkeypatch.setattr(http_reply, "asked", lambda *_, **__: reply)
    with pytest.raises(EngineFault, match="is_paused") if fault else nullcontext():
        server.probe(paused=True)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ([3, 2, 1, 0], False),
        ([3, 2, 1], True),
        ([3, 2, 1, -1], True),
        ([3, 2, 1, 0.5], True),
        ("3210", True),
        (None, True),
    ],
)
def test_counts_of_drafts_are_two_numbers_for_each_position(
    said: Any, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerClient("http://10.0.0.2:8100", {})
    reply = HTTPReply(200, json.dumps({"counts": said}).encode())
    monkeypatch.setattr(http_reply, "asked", lambda *_, **__: reply)
    with pytest.raises(EngineFault, match="/drafts without 4 counts") if fault else nullcontext():
        assert server.draft_counts(2) == said


def test_a_trainer_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "START_SECONDS", 0.0)
    monkeypatch.setitem(globals(), "absent", {"http://10.0.0.2:8100"})
    with pytest.raises(
        EngineError, match=r"No server could be used within 0 s: http://10\.0\.0\.2:8100"
    ):
        server_group_of("http://10.0.0.2:8100").wait()
