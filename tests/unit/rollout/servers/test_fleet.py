"""What a fleet makes of servers elsewhere; their faults in runs are in tests/fleet_chaos.py."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rftmega.core.errors import EngineError, EngineFault
from rftmega.rollout.servers import fleet as fleet_module
from rftmega.rollout.servers import server_client
from rftmega.rollout.servers.fleet import Fleet, FleetMember
from rftmega.rollout.servers.protocol import http_reply
from rftmega.rollout.servers.protocol.http_reply import HTTPReply
from rftmega.rollout.servers.server_client import ServerClient

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


def fleet_of(*addresses: str, roster: str | Path = "") -> Fleet:
    def none_of_ours(number: int) -> Any:
        raise AssertionError(number)

    client: Any = Elsewhere
    return Fleet(none_of_ours, client=client, addresses=addresses, roster=roster)


def fleet_of_one() -> tuple[Fleet, FleetMember, Any]:
    """Returns a fleet whose server has the newest weights and has just failed a request."""
    fleet = fleet_of("http://10.0.0.2:8100")
    fleet.renew()
    (member,) = fleet.members
    member.health.landed()
    member.health.failed()
    return fleet, member, member.server


def test_a_server_elsewhere_that_answers_a_probe_is_healthy_again() -> None:
    fleet, member, _ = fleet_of_one()
    fleet.probe(member)
    assert fleet.healthy == [member.server]


def test_a_server_elsewhere_that_was_started_again_is_stale_when_it_answers_a_probe() -> None:
    fleet, member, server = fleet_of_one()
    server.start = "second"
    fleet.probe(member)
    assert member.state == "stale"
    fleet.renew()
    member.health.landed()
    assert (member.health.starts, fleet.healthy) == (2, [server])


def test_a_server_that_was_started_again_and_failed_no_request_is_stale_at_the_next_push() -> None:
    fleet, member, server = fleet_of_one()
    member.health.probed(True)
    server.start = "second"
    fleet.renew()
    assert (member.state, member.health.starts) == ("stale", 2)


def test_between_pushes_servers_come_and_leave_and_those_that_answer_are_left_alone(
    tmp_path: Path,
) -> None:
    roster = tmp_path / "roster"
    roster.write_text("http://a:1\n")
    fleet = fleet_of(roster=roster)
    fleet.renew()
    fleet.members[0].health.landed()
    fleet.members[0].server.start = "second"  # type: ignore[attr-defined]
    roster.write_text("http://a:1\nhttp://b:1\n")
    assert fleet.late == [] and len(fleet.members) == 1
    fleet.look_elsewhere()
    assert [each.server.address for each in fleet.late] == ["http://b:1"]
    assert fleet.healthy == [fleet.members[0].server], "it was looked at"
    fleet.late[0].health.landed()
    roster.write_text("http://b:1\n")
    fleet.pushing = True
    fleet.look_elsewhere()
    assert len(fleet.healthy) == 2, "one left while weights were brought"
    fleet.pushing = False
    fleet.look_elsewhere()
    assert [each.address for each in fleet.healthy] == ["http://b:1"] and fleet.late == []
    with pytest.raises(EngineFault, match="server-0-start-1 has left"):
        fleet.named("server-0-start-1")


def test_a_trainer_that_is_there_first_waits_for_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fleet_module.time, "sleep", lambda seconds: roster.write_text("http://10.0.0.3:8100\n")
    )
    roster = tmp_path / "roster.txt"
    fleet = fleet_of(roster=roster)
    fleet.wait()
    assert [member.server.address for member in fleet.reachable] == ["http://10.0.0.3:8100"]


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


def test_a_trainer_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "START_SECONDS", 0.0)
    monkeypatch.setitem(globals(), "absent", {"http://10.0.0.2:8100"})
    with pytest.raises(
        EngineError, match=r"No server could be used within 0 s: http://10\.0\.0\.2:8100"
    ):
        fleet_of("http://10.0.0.2:8100").wait()
