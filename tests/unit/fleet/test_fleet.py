"""What a fleet makes of servers elsewhere; their faults in runs are in tests/fleet_chaos.py."""

from typing import Any

from rftmega.fleet.fleet import Fleet, FleetMember


class Elsewhere:
    """A server that somebody else starts: `identity` changes with each start."""

    own = False

    def __init__(self, address: str):
        self.address, self.identity = address, "first"

    def there(self) -> bool:
        return True

    def probe(self, *, paused: bool) -> None: ...

    def told(self, path: str) -> dict[str, Any]:
        return {"identity": self.identity}


def fleet_of_one() -> tuple[Fleet, FleetMember, Any]:
    """Returns a fleet whose server has the newest weights and has just failed a request."""

    def none_of_ours(number: int) -> Any:
        raise AssertionError(number)

    client: Any = Elsewhere
    fleet = Fleet(none_of_ours, client=client, addresses=["http://10.0.0.2:8100"])
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
    server.identity = "second"
    fleet.probe(member)
    assert member.state == "stale"
    fleet.renew()
    member.health.landed()
    assert (member.health.starts, fleet.healthy) == (2, [server])
