"""Ends a rollout on all engines together, as soon as their finished answers suffice; deals out
requests until then.
"""

from collections.abc import Mapping, Sequence

from rftmega.core.interfaces import Enough
from rftmega.core.types import Rollout
from rftmega.rollout.pool.gathered_rollouts import gathered
from rftmega.rollout.pool.request_queues import Dealt
from rftmega.rollout.pool.reward_workers import RewardWorkers
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.host_memory import HostMemory

EVERY = 16  # engine steps from one decision to the next


class StopConsensus:
    """StopConsensus knows what the engines of all processes have finished; every process asks it
    after each step of its engine.

    Decisions fall after the same steps of every engine, whatever time these took, and know what was
    finished one decision earlier, scores included: those are waited for. So the same requests end
    with the same answers, run after run, and rewards have EVERY steps of time before an engine
    waits for them. (A tool whose time varies changes what is finished at a decision.) A request to
    stop the run ends it, too: `given_up`.

    With each decision, engines that have room are dealt what none has begun
    (`request_queues.Dealt`).
    """

    def __init__(
        self,
        judging: RewardWorkers,
        queue: Dealt,
        requests: int,
        enough: Enough,
        *,
        host: HostMemory,
        speaks: bool,
        processes: int,
    ):
        """Takes all `requests` of the rollout, of which the `queue` knows those of this process's
        engine, one of `processes` that each engine has; one of them `speaks` for it.
        """
        self.judging, self.queue, self.enough = judging, queue, enough
        self.host, self.speaks, self.processes = host, speaks, processes
        self.completions: list[Rollout | None] = [None] * requests
        self.over = self.given_up = False
        self._steps = 0  # since the last decision
        self._told = self._finished = 0  # of reports, until the last decision
        self._answered = len(judging.answered)  # until then

    def __call__(self) -> bool:
        self._steps += 1
        return self._steps == EVERY and self._decide(idle=False)

    def wait(self, *, broken: bool = False) -> bool:
        """Decides with the others, while this process's engine has nothing left to do.
        Whether it was dealt something by then; a `broken` one is not.
        """
        while not self.over and not self.given_up:
            self._decide(idle=True, broken=broken)
            if self.queue.waiting and not broken and not self.over and not self.given_up:
                return True
        return False

    def finish(self) -> None:
        """Tells everybody what has ended since the last decision, scores included; a collective."""
        own = self.judging.scored(self._told) if self.speaks else {}
        where, rollouts, _ = gathered(own, self.host)
        self._note(where, rollouts)

    def _decide(self, *, idle: bool, broken: bool = False) -> bool:
        """Decides; a collective."""
        self._steps = 0
        asked, own = preemption.asked(), dict[int, Rollout]()
        if self.speaks and self.judging.settled(preemption.asked, self._told, self._finished):
            own = self.judging.scored(self._told, self._finished)
        elif self.speaks:  # scores were not waited for, so this is the last decision
            asked = True
        self._told, self._finished = self._finished, len(self.judging.reports)
        done = idle and self._told == self._finished and not asked
        before, self._answered = self._answered, len(self.judging.answered)
        room = 0 if broken else self.queue.room(self._answered, self._answered - before)
        where, rollouts, told = gathered(own, self.host, done, asked, room)
        self._note(where, rollouts)
        self.over = self.enough(self.completions)
        self.given_up = not self.over and any(asked for _, asked, _ in told)
        if not self.over and not self.given_up:
            dealt = self.queue.deal([room for *_, room in told[:: self.processes]])
            self.over = not dealt and all(done for done, *_ in told)
        return self.over or self.given_up

    def _note(self, where: Mapping[int, int], rollouts: Sequence[Rollout | None]) -> None:
        for task, number in where.items():
            self.completions[task] = rollouts[number]
