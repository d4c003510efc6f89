"""Which servers are asked: the states of one server, over a clock of the test."""

from rftmega.rollout.servers.health import DEAD_AFTER, ServerHealth


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def health_of(clock: Clock) -> ServerHealth:
    health = ServerHealth(clock)
    health.came()
    health.landed()
    return health


def test_a_server_that_came_is_stale_until_a_push_lands() -> None:
    health = ServerHealth()
    assert health.state == "restarting"
    health.came()
    assert health.state == "stale"
    health.landed()
    assert health.state == "healthy"
    health.missed()
    assert health.state == "stale"


def test_a_server_that_failed_is_healthy_again_once_it_answers_a_probe() -> None:
    clock = Clock()
    health = health_of(clock)
    assert health.failed() and not health.failed(), "the second is no news"
    assert (health.state, health.probe_is_due) == ("suspect", False)
    clock.now = 1.0
    assert health.probe_is_due
    health.probed(True)
    assert (health.state, health.faults) == ("healthy", 1)


def test_a_server_that_missed_a_push_while_it_was_suspect_is_stale_when_it_answers() -> None:
    health = health_of(Clock())
    health.failed()
    health.missed()
    assert health.state == "suspect"
    health.probed(True)
    assert health.state == "stale"


def test_a_server_that_answers_no_probe_is_dead_and_looked_at_ever_less() -> None:
    clock = Clock()
    health = health_of(clock)
    health.failed()
    waits = []
    for _ in range(DEAD_AFTER + 5):
        before = clock.now
        while not health.probe_is_due:
            clock.now += 0.5
        waits.append(clock.now - before)
        health.probed(False)
    assert waits == [1, 2, 4, 8, 15, 15, 15, 15]
    assert health.state == "dead"
    health.came()
    assert health.state == "stale"
