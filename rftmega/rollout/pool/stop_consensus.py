"""Stops a generation on all engines at the same step, once the finished rollouts of all engines
suffice, and assigns tasks to engines until then.
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
    """StopConsensus decides, on all processes together, when a generation has enough rollouts.
    Every process calls it after each step of its engine; the call returns whether the generation
    ends.

    Decisions are made every EVERY engine steps, however long these took, and use the rollouts that
    had finished by the previous decision, waiting for their scores. So the same requests end with
    the same completions in every run, and rewards have EVERY steps of time before an engine waits
    for them. (A tool with varying latency changes which rollouts are finished at a decision.) A
    request to stop the run also ends the generation, with `given_up` set.

    At each decision, engines with room are assigned tasks that have not begun
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
        """Starts a generation. `judging`: the rollouts that ended in this process, with their
        scores; `queue`: the tasks of this process's engine; `requests`: number of all tasks of the
        generation; `enough`: returns whether the rollouts so far suffice; `host`: shared memory for
        gathered rollouts; `speaks`: whether this is its engine's first process; `processes`: number
        of processes per engine.
        """
        self.judging, self.queue, self.enough = judging, queue, enough
        self.host, self.speaks, self.processes = host, speaks, processes
        self.completions: list[Rollout | None] = [None] * requests
        self.over = self.given_up = False
        self._steps = 0  # since the last decision
        self._told = self._finished = 0  # numbers of batches, at the last decision
        self._answered = len(judging.answered)  # at the last decision

    def __call__(self) -> bool:
        self._steps += 1
        return self._steps == EVERY and self._decide(idle=False)

    def wait(self, *, broken: bool = False) -> bool:
        """Takes part in decisions while this process's engine is idle. Returns True as soon as the
        engine is assigned a task, False when the generation ends. `broken`: whether the engine
        broke down, so that it is assigned no task.
        """
        while not self.over and not self.given_up:
            self._decide(idle=True, broken=broken)
            if self.queue.waiting and not broken and not self.over and not self.given_up:
                return True
        return False

    def finish(self) -> None:
        """Gathers the rollouts, with their scores, that have ended since the last decision, once
        the generation has ended; a collective.
        """
        own = self.judging.scored(self._told) if self.speaks else {}
        where, rollouts, _ = gathered(own, self.host)
        self._note(where, rollouts)

    def _decide(self, *, idle: bool, broken: bool = False) -> bool:
        """Makes one decision together with all other processes; a collective. Returns whether the
        generation ends. `idle`: whether this process's engine has no requests; `broken`: whether it
        broke down.
        """
        self._steps = 0
        asked, own = preemption.asked(), dict[int, Rollout]()
        if self.speaks and self.judging.settled(preemption.asked, self._told, self._finished):
            own = self.judging.scored(self._told, self._finished)
        elif self.speaks:  # the wait for scores was cut short, so this is the last decision
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
