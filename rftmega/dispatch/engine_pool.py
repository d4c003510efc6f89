"""EnginePool presents the engines of all ranks as one RolloutEngine.

It splits requests by expected length, gathers completions to every rank, and restarts engines that
broke down.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from rftmega import device
from rftmega.dispatch.pending_requests import PendingRequests
from rftmega.dispatch.request_queues import Counted, Dealt, Queue
from rftmega.dispatch.stop_consensus import EVERY, StopConsensus
from rftmega.errors import EngineFault, Preempted
from rftmega.interfaces import Enough, Reward, WeightSync
from rftmega.parallel import preemption
from rftmega.parallel.collectives import board, gather_objects, neighbours
from rftmega.parallel.process_group import World
from rftmega.parallel.watchdog import mark
from rftmega.rollout.base import Engine, Stop
from rftmega.rollout.request_order import RequestOrder, ordered
from rftmega.types import (
    Completion,
    Prompt,
)

PATIENCE = 10.0  # seconds
log = logging.getLogger(__name__)
_rollouts = itertools.count()  # of this process; all count alike
Result = TypeVar("Result")


class Phases(Protocol):
    """Phases gives the device to whoever works next (`strategy.phases.DevicePhases`)."""

    def rollout(self) -> None: ...


class EnginePool:
    """All engines of the run as one: splits the prompts over them and gives every process every
    completion.
    """

    def __init__(
        self,
        engine: Engine,
        phases: Phases,
        world: World,
        weights: WeightSync,
        *,
        processes_per_engine: int,
        restarts: int,
        reward_limit: float = math.inf,
    ):
        """Engines that break down are restarted, get `weights` again and answer what is left,
        `restarts` times a generation. `reward_limit`: seconds that a reward may take, see Judging.
        """
        self.engine = engine
        self.phases = phases
        self.weights, self.restarts, self.reward_limit = weights, restarts, reward_limit
        self.engines = world.size // processes_per_engine
        self.processes, self.alone = processes_per_engine, processes_per_engine == 1
        self.group = None if self.alone else neighbours(processes_per_engine)
        self.mine, place = divmod(world.rank, processes_per_engine)
        self.speaks = place == 0  # the processes of one engine have the same answers

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None = None,
    ) -> list[Completion]:
        """Generates on all engines: each begins with requests of about the same expected length,
        the long ones first, and takes what none has begun when it has room
        (`request_order.ordered`, `request_queues.Counted`). Each answer is scored once, in the
        process that has it. Raises on every process EngineFault where restarts did not help,
        Preempted where the run is asked to stop: no engine begins another step then.
        """
        settings: dict[str, Any] = {
            "name": f"rollout {next(_rollouts)}",
            "speaks": self.speaks,
            "alone": self.alone,
        }
        queue = Counted(self._ordered(prompts), self.mine, board=board(), **settings)
        found: list[Completion | None] = [None] * len(prompts)
        with self._asking(queue, prompts, seeds, temperature, reward) as asking:
            answers = self._over_faults(lambda: self._ask(asking), asking.judging.ready)
            for spoken in gather_objects(answers if self.speaks else {}):
                for place, answer in spoken.items():
                    found[place] = answer
            queue.end()
            if None in found:  # in here nobody waits for scores that are still to come
                raise Preempted(found)
        whole = [answer for answer in found if answer is not None]
        self.learn(prompts, whole)
        return whole

    def generate_until(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None = None,
        enough: Enough,
    ) -> list[Completion | None]:
        """Generates until all engines stop, after the same number of steps, decided from all
        answers (`stop_consensus.StopConsensus`). Raises Preempted, with no answers, where the run
        is asked to stop.
        """
        queue = Dealt(self._ordered(prompts), self.mine, slots=self.engine.slots)
        with self._asking(queue, prompts, seeds, temperature, reward) as asking:
            found = self._over_faults(lambda: self._ask_until(asking, queue, enough), _give_up)
        self.learn(prompts, found)
        return found

    def state(self) -> dict[str, Any]:
        """Returns the expected lengths of each prompt's answers, for a resume."""
        return self.engine.lengths.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.engine.lengths.load_state(state)

    def learn(self, prompts: Sequence[Prompt], completions: Sequence[Completion | None]) -> None:
        self.engine.lengths.learn(prompts, completions)

    def _ordered(self, prompts: Sequence[Prompt]) -> RequestOrder:
        """Orders the requests. The only engine begins all of them itself."""
        slots = self.engine.slots if self.engines > 1 else len(prompts)
        return ordered(prompts, self.engine.lengths.expected(prompts), self.engines, slots)

    def _asking(
        self,
        queue: Queue,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None,
    ) -> PendingRequests:
        spoken = reward if self.speaks else None
        limit = self.reward_limit
        return PendingRequests(
            self.engine,
            prompts,
            seeds,
            temperature,
            spoken,
            queue,
            agree=self._agree,
            reward_limit=limit,
        )

    def _agree(self, places: list[int]) -> list[int]:
        """Returns the places of this engine's first process: one that broke down may have got
        further than another.
        """
        return places if self.alone else gather_objects(places, self.group)[0]

    def _over_faults(self, work: Callable[[], Result], given_up: Callable[[], Result]) -> Result:
        """Returns what comes of `work`, which is called again, everywhere, when an engine broke
        down and all of them hold weights; of `given_up` where the run is asked to stop by then:
        engines may have got the same signal.
        """
        version, again = self.engine.version, 0
        while True:
            try:
                if again:
                    assert version is not None, "without weights it would not have got so far"
                    _agreed(self.engine.restart)
                    self.weights.push(version=version)
                self.phases.rollout()
                return _agreed(work)
            except EngineFault as fault:
                if preemption.agreed():
                    return given_up()
                if again == self.restarts:
                    raise EngineFault(
                        f"{fault} (faults.engine_restarts={self.restarts} did not help.)"
                    ) from fault
                if dist.get_rank() == 0:
                    log.warning(
                        "engines start again (%d of %d), for what is unanswered: %s",
                        again + 1,
                        self.restarts,
                        fault,
                    )
                again += 1

    def _ask(self, asking: PendingRequests) -> dict[int, Completion]:
        """Returns place -> answer; where the run is asked to stop, of those that have their scores
        by then.
        """
        whole = asking.go_on(self._asked_to_stop()) and asking.judging.settled(preemption.asked)
        return asking.judging.scored() if whole else asking.judging.ready()

    def _asked_to_stop(self) -> Stop:
        """Returns the stop condition of one rollout. The processes of one engine go step by step
        together, so they must end at the same step.
        """
        steps = itertools.count(1)
        return (
            preemption.asked
            if self.alone
            else lambda: next(steps) % EVERY == 0 and preemption.agreed(self.group)
        )

    def _ask_until(
        self, asking: PendingRequests, queue: Dealt, enough: Enough
    ) -> list[Completion | None]:
        """Returns the answers to all requests, of which this process's engine is to give those that
        the queue gives it.
        """
        settings: dict[str, Any] = {"speaks": self.speaks, "processes": self.processes}
        together = StopConsensus(asking.judging, queue, len(asking.prompts), enough, **settings)
        broken: EngineFault | None = None
        try:
            asking.go_on(together)
            while together.wait():
                asking.go_on(together)
        except EngineFault as fault:
            broken = fault
            together.wait(broken=True)  # others' engines go on, and decisions need everybody
        if together.given_up:
            raise Preempted
        if broken and not enough(together.answers):
            raise broken
        return together.answers


def _give_up() -> list[Completion | None]:
    raise Preempted


def _agreed(work: Callable[[], Result]) -> Result:
    """Calls `work`, as every process does, and returns its result.

    Raises EngineFault on all where it was raised on one.
    """
    try:
        told, result = "", work()
    except EngineFault as fault:
        told = str(fault)
    if faults := list(filter(None, gather_objects(told))):
        raise EngineFault(faults[0])
    return result


class ServerPool(EnginePool):
    """ServerPool presents engines that the first process alone speaks to. The others wait as long
    as it takes: a collective that began with the rollout would time out in a long one. When such
    engines stop early is decided by time: what has arrived, and was scored.
    """

    def _ask(self, asking: PendingRequests) -> dict[int, Completion]:
        return self._patiently(lambda: EnginePool._ask(self, asking))

    def _asked_to_stop(self) -> Stop:
        return preemption.asked

    def _agree(self, places: list[int]) -> list[int]:
        return places  # who asks is alone

    def _ask_until(
        self, asking: PendingRequests, queue: Dealt, enough: Enough
    ) -> list[Completion | None]:
        def found_of(arrived: Mapping[int, Completion]) -> list[Completion | None]:
            return [arrived.get(place) for place in range(len(asking.prompts))]

        def ask() -> list[Completion | None]:
            arrived: dict[int, Completion] = {}

            def suffices() -> bool:
                arrived.update(asking.judging.ready())
                return enough(found_of(arrived))

            whole = asking.go_on(lambda: suffices() or preemption.asked())
            if whole and not asking.judging.settled(preemption.asked):
                return found_of(asking.judging.ready())
            return found_of(asking.judging.scored() if whole else arrived)

        found = [_agreed(lambda: self._patiently(ask))]
        dist.broadcast_object_list(found, 0)
        if None in found[0] and not enough(found[0]):
            raise Preempted
        return found[0]

    def _patiently(self, work: Callable[[], Result]) -> Result:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(work)
            done = torch.zeros((), device=device.current().here())
            while not done:
                if dist.get_rank() == 0:
                    wait([asked], timeout=PATIENCE)
                    done.fill_(asked.done())
                dist.broadcast(done, 0)
                if dist.get_rank() > 0:
                    mark()  # the first process is alive, and watches itself
                    preemption.asked()  # tells it
            return asked.result()
