"""Decides what an elastic run does next, from what a node sees: a function without side effects.

Every node decides by itself. Only the leader, the first living node of the round (of all, before the
first round), acts on what concerns all of them. If two nodes take themselves for the leader, because
one of them sees more than the other, the first to create the round's file wins.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from rftmega.run.elastic.membership import (
    ENDED,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    ClusterView,
    Member,
    Round,
)

LARGEST_SEARCH = 12  # nodes up to which all sets of nodes that reach each other are compared


@dataclass(frozen=True)
class NodeLimits:
    """NodeLimits are the bounds of an elastic run: the fewest and most nodes (`least`, `most`), and the
    number of failed rounds in a row without a new checkpoint at which it gives up (`failures`).
    """

    least: int
    most: int
    failures: int = 3


@dataclass(frozen=True)
class Wait:
    """Wait is the decision to do nothing now, because of `reason` (empty: all is well)."""

    reason: str = ""


@dataclass(frozen=True)
class Begin:
    """Begin is the decision to begin a round with `candidates`, in the order of their ranks, or with
    the first of them if there is no layout for so many.
    """

    candidates: tuple[str, ...]
    reason: str
    failed: bool = False  # the last round failed, rather than stopped or lost a node


@dataclass(frozen=True)
class Stop:
    """Stop is the decision to ask the round's nodes to save and stop."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """Finish is the decision to end the run for all nodes."""

    code: int
    message: str


Decision = Wait | Begin | Stop | Finish


def problem(seen: ClusterView) -> str:
    """Returns why the present round can't go on; empty if it can, or if there is none."""
    if seen.round is None:
        return ""
    if gone := lost(seen.round, seen):
        return "; ".join(_of_lost(name, seen) for name in gone)
    here = _members(seen.round, seen)
    for state in (FAILED, ENDED):  # the cause before what followed from it
        for member in here:
            if member.round == seen.round.number and member.state == state:
                return f"{member.name}: {member.reason}"
    for one, other in combinations(here, 2):
        if other.name in one.unreachable or one.name in other.unreachable:
            return f"{one.name} and {other.name} can't reach each other"
    return ""


def lost(of: Round, seen: ClusterView) -> list[str]:
    """Returns the names of the round's nodes that are not alive, or were started again since."""
    return [
        name
        for name, token in of.members
        if name not in seen.alive or seen.alive[name].token != token
    ]


def leads(name: str, seen: ClusterView) -> bool:
    """Returns whether the node is the leader: the first living one of the round, else of all."""
    return next(iter(_order(seen)), "") == name


def decide(
    seen: ClusterView,
    limits: NodeLimits,
    *,
    settled: bool,
    requeue_code: int,
    usable: Callable[[int], int] = lambda nodes: nodes,
    tried: Collection[str] | None = None,
    progressed: bool = False,
) -> Decision:
    """Returns what the leader does next.

    `settled`: no node has come within the last seconds, so that a start need not wait for more;
    `requeue_code`: exit code of a run that was stopped and can be started again; `usable`: returns
    how many of a number of nodes a layout is known for; `tried`: nodes that have been there for long
    enough to know whether others reach them (None: all); `progressed`: the round has a new
    checkpoint.
    """
    order = _order(seen)
    staying = [name for name in order if not seen.alive[name].leaving]
    now = seen.round
    if now is None:
        return _first(staying, limits, settled=settled, requeue_code=requeue_code, seen=seen)
    here = _members(now, seen)
    if here and here[0].name == now.names[0] and _state(here[0], now) == FINISHED:
        return Finish(0, "finished")
    trouble = problem(seen)
    stopped = bool(here) and all(_state(member, now) == STOPPED for member in here)
    if not trouble and not stopped:
        known = [name for name in staying if tried is None or name in tried]
        return _of_running(seen, now, known, limits, usable)
    if any(_state(member, now) == RUNNING for member in here):
        return Wait(f"the ranks of round {now.number} end: {trouble or seen.stop}")
    candidates = reaching(staying, seen.alive)
    if not staying and order:
        return Finish(requeue_code, "all nodes were asked to end")
    if len(candidates) < limits.least:
        return Wait(f"{len(candidates)} of at least {limits.least} nodes are there")
    if not here and len(candidates) < limits.most and not settled:
        return Wait(f"{len(candidates)} nodes are there, more may come")
    # ranks also die of the loss of another node, which is no fault of the run
    failed = not lost(now, seen) and any(_state(member, now) == FAILED for member in here)
    if failed and not progressed and now.failures + 1 >= limits.failures:
        return Finish(
            1, f"gave up after {limits.failures} failures without a new checkpoint: {trouble}"
        )
    why = trouble or seen.stop or "the last round stopped"
    return Begin(tuple(candidates[: limits.most]), why, failed=failed)


def may_leave(name: str, seen: ClusterView) -> bool:
    """Returns whether a node that was asked to leave, and whose ranks have ended, can go now: the
    others don't need it, and none of them still saves with it.
    """
    if all(member.leaving for member in seen.alive.values()):
        return False  # the leader ends the run
    if seen.round is None or name not in seen.round.names:
        return True
    here = _members(seen.round, seen)
    return all(_state(member, seen.round) != RUNNING for member in here)


def reaching(names: Sequence[str], alive: Mapping[str, Member]) -> list[str]:
    """Returns the largest set of the named nodes that all reach each other, in their order; of sets
    of the same size the one with the earliest nodes.
    """

    def apart(one: str, other: str) -> bool:
        return other in alive[one].unreachable or one in alive[other].unreachable

    if not any(apart(one, other) for one, other in combinations(names, 2)):
        return list(names)
    if len(names) <= LARGEST_SEARCH:
        for size in range(len(names), 0, -1):
            for chosen in combinations(names, size):
                if not any(apart(one, other) for one, other in combinations(chosen, 2)):
                    return list(chosen)
    found: list[str] = []
    # those that most others reach come first
    by_trouble = sorted(names, key=lambda name: sum(apart(name, other) for other in names))
    for name in by_trouble:
        if not any(apart(name, other) for other in found):
            found.append(name)
    return [name for name in names if name in found]


def _first(
    staying: Sequence[str],
    limits: NodeLimits,
    *,
    settled: bool,
    requeue_code: int,
    seen: ClusterView,
) -> Decision:
    if not staying and seen.alive:
        return Finish(requeue_code, "all nodes were asked to end before the run began")
    if len(staying) < limits.least:
        return Wait(f"{len(staying)} of at least {limits.least} nodes are there")
    if len(staying) < limits.most and not settled:
        return Wait(f"{len(staying)} nodes are there, more may come")
    candidates = reaching(staying, seen.alive)
    if len(candidates) < limits.least:
        return Wait(f"only {len(candidates)} of {len(staying)} nodes reach each other")
    return Begin(tuple(candidates[: limits.most]), "the run begins")


def _of_running(
    seen: ClusterView,
    now: Round,
    staying: Sequence[str],
    limits: NodeLimits,
    usable: Callable[[int], int],
) -> Decision:
    """Returns the decision while the round has no problem."""
    if seen.stop:
        return Wait()
    leaving = [name for name in now.names if seen.alive[name].leaving]
    if leaving:
        return Stop(f"{', '.join(leaving)} leaves")
    coming = [name for name in staying if name not in now.names]
    if coming and len(now.members) < limits.most:
        together = reaching([*now.names, *coming], seen.alive)
        added = [name for name in coming if name in together]
        most = min(len(now.members) + len(added), limits.most)
        if added and usable(most) > len(now.members):
            return Stop(f"{', '.join(added)} joins")
    return Wait()


def _order(seen: ClusterView) -> list[str]:
    """Returns the names of all living nodes: those of the round first, in its order."""
    before = [name for name in (seen.round.names if seen.round else ()) if name in seen.alive]
    return [*before, *(name for name in seen.alive if name not in before)]


def _members(of: Round, seen: ClusterView) -> list[Member]:
    gone = lost(of, seen)
    return [seen.alive[name] for name in of.names if name not in gone]


def _state(member: Member, of: Round) -> str:
    """Returns the member's state in the round: RUNNING before it has taken notice of it."""
    return member.state if member.round == of.number else RUNNING


def _of_lost(name: str, seen: ClusterView) -> str:
    if name in seen.silent:
        return f"{name} gave no sign of life for {seen.silent[name]:.0f} s"
    return f"{name} was started again" if name in seen.alive else f"{name} has left"
