"""EnginePool presents the engines of all ranks as one RolloutEngine.

It splits requests by expected length, gathers completions to every rank, and restarts engines that
broke down.
"""

import asyncio
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rftmega.core.errors import EngineFault, Preempted
from rftmega.core.interfaces import Enough, Environment, Reward, WeightSync
from rftmega.core.rollout_arrays import RolloutArrays
from rftmega.core.shards import AdapterSource, Shard
from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.rollout.engines.base import Engine
from rftmega.rollout.pool.announcements import Announcements
from rftmega.rollout.pool.colocated_weights import ColocatedWeights, Phases
from rftmega.rollout.pool.gathered_rollouts import gathered, in_order, shared
from rftmega.rollout.pool.partial_rollouts import PartialRollouts
from rftmega.rollout.pool.pending_requests import PendingRequests, Stop, Tasks
from rftmega.rollout.pool.request_queues import Counted, Dealt, Queue
from rftmega.rollout.pool.stop_consensus import EVERY, StopConsensus
from rftmega.rollout.requests.order import RequestOrder, ordered
from rftmega.runtime import device
from rftmega.runtime.parallel import host_memory, preemption
from rftmega.runtime.parallel.collectives import board, gather_objects, neighbours
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.watchdog import mark

PATIENCE = 10.0  # seconds
log = logging.getLogger(__name__)
_rollouts = itertools.count()  # of this process; all count alike
Result = TypeVar("Result")


class EnginePool:
    """EnginePool presents all engines of the run as one: it splits the tasks over them and gives
    every process every rollout.
    """

    def __init__(
        self,
        engine: Engine,
        phases: Phases,
        world: World,
        environment: Environment,
        *,
        processes_per_engine: int,
        restarts: int,
        reward_limit: float = math.inf,
        repeats: int = 0,
        most_running: int = 1024,
    ):
        """Collective. Engines that break down are restarted, get the weights again and answer what is left,
        `restarts` times a generation. `reward_limit`: seconds that a reward may take, see
        RewardWorkers. `repeats` of a rollout, see RunningRollouts. `most_running`: rollouts that one
        engine has under way, those that wait for tools among them.
        """
        self.repeats, self.most_running = repeats, most_running
        self.engine, self.phases, self.environment = engine, phases, environment
        self.weights: WeightSync | None = None
        self._loop = asyncio.new_event_loop()  # of the environment, as long as the run
        self.restarts, self.reward_limit = restarts, reward_limit
        self.engines = world.size // processes_per_engine
        self.processes, self.alone = processes_per_engine, processes_per_engine == 1
        self.group = None if self.alone else neighbours(processes_per_engine)
        self.mine, place = divmod(world.rank, processes_per_engine)
        self.speaks = place == 0  # the others do what the engine's first process says
        self.host = host_memory.current()

    def weight_sync(
        self, shards: Sequence[Shard], *, bucket_bytes: int, rounds: bool = False
    ) -> WeightSync:
        """Returns what brings the policy's shards into all engines; every process calls it. `rounds`:
        adapters are merged into weights that have fewer digits, and a push tells what that loses.
        """
        sync = self.engine.weight_sync(shards, bucket_bytes=bucket_bytes)
        self.weights = ColocatedWeights(sync, self.phases, shards if rounds else None)
        return self.weights

    def adapter_sync(
        self, frozen: Sequence[Shard], adapters: AdapterSource, *, bucket_bytes: int
    ) -> WeightSync:
        """Returns what brings a frozen model's shards and its adapters; every process calls it."""
        sync = self.engine.adapter_sync(frozen, adapters, bucket_bytes=bucket_bytes)
        self.weights = ColocatedWeights(sync, self.phases)
        return self.weights

    def close(self) -> None:
        """Ends the engine, which must be gone before the process groups are, and the environment."""
        try:
            if end := getattr(self.environment, "close", None):
                self._loop.run_until_complete(_ended(end))
            self._loop.close()
        finally:
            self.engine.close()

    @contextmanager
    def answering_with(self, adapter: str) -> Iterator[None]:
        """Has the engines answer with another adapter than the policy's meanwhile."""
        self.engine.answer_with(adapter)
        try:
            yield
        finally:
            self.engine.answer_with("")

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        reward: Reward | None = None,
        enough: Enough | None = None,
        expected_lengths: Sequence[float] | None = None,
    ) -> Sequence[Rollout | None]:
        """Generates on all engines: each begins with tasks of about the same expected length, the
        long ones first, and takes what none has begun when it has room (`requests.order.ordered`,
        `request_queues`). Each rollout is scored once, in the process that has it.

        With `enough` all engines stop after the same number of steps, decided from all rollouts
        (`stop_consensus.StopConsensus`). Raises on every process EngineFault where restarts did not
        help, Preempted where the run is asked to stop: no engine begins another step then. Preempted
        has the rollouts so far, where there is no `enough`.
        """
        lengths = expected_lengths or [float(len(prompt.token_ids)) for prompt in prompts]
        return self._generated(Tasks(prompts, seeds, lengths, sampling), reward, enough)

    def _generated(
        self,
        tasks: Tasks,
        reward: Reward | None,
        enough: Enough | None,
        partials: PartialRollouts | None = None,
    ) -> RolloutArrays:
        """Does what `generate` does; with `partials` answers go on where they were broken off, and
        what is broken off now is noted.
        """
        name = f"rollout {next(_rollouts)}"
        announced = self._announcements(f"{name}/{self.mine}")
        order = self._ordered(tasks)
        queue: Queue = Dealt(order, self.mine, slots=self.engine.slots)
        if enough is None:
            queue = Counted(order, self.mine, board=board(), name=name)
        pending = PendingRequests(
            self.engine,
            tasks,
            queue,
            self.environment,
            reward if self.speaks else None,
            announced=announced,
            reward_limit=self.reward_limit,
            repeats=self.repeats,
            most_running=self.most_running,
            partials=partials,
            loop=self._loop,
        )
        with pending:
            found = self._all(pending) if enough is None else self._until(pending, enough)
            # after a collective: every process is through
            if announced is not None:
                announced.end()
            queue.end()
            if (
                enough is None and None in found.places
            ):  # in here nobody waits for scores still to come
                raise Preempted(found)
        return found

    def _announcements(self, name: str) -> Announcements | None:
        """Returns what the processes of this engine tell each other by; None where it has one."""
        return None if self.alone else Announcements(board(), name, speaks=self.speaks)

    def _ordered(self, tasks: Tasks) -> RequestOrder:
        """Orders the tasks. The only engine begins all of them itself."""
        slots = self.engine.slots if self.engines > 1 else len(tasks)
        return ordered(tasks.prompts, tasks.expected_lengths, self.engines, slots)

    def _all(self, pending: PendingRequests) -> RolloutArrays:
        """Returns all rollouts; where the run is asked to stop, those that have their scores."""
        own = self._over_faults(lambda: self._ask(pending), pending.judging.ready)
        where, rollouts, _ = gathered(own if self.speaks else {}, self.host)
        return in_order(where, rollouts, len(pending.tasks))

    def _until(self, pending: PendingRequests, enough: Enough) -> RolloutArrays:
        found = self._over_faults(lambda: self._ask_until(pending, enough), _give_up)
        return shared(found, self.host)

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
                    assert self.weights is not None
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

    def _ask(self, pending: PendingRequests) -> dict[int, Rollout]:
        """Returns place -> answer; where the run is asked to stop, of those that have their scores
        by then.
        """
        whole = pending.go_on(self._asked_to_stop()) and pending.judging.settled(preemption.asked)
        return pending.judging.scored() if whole else pending.judging.ready()

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

    def _ask_until(self, pending: PendingRequests, enough: Enough) -> Sequence[Rollout | None]:
        """Returns the answers to all requests, of which this process's engine is to give those that
        the queue gives it.
        """
        assert isinstance(pending.queue, Dealt)
        together = StopConsensus(
            pending.judging,
            pending.queue,
            len(pending.tasks),
            enough,
            host=self.host,
            speaks=self.speaks,
            processes=self.processes,
        )
        broken: EngineFault | None = None
        try:
            pending.go_on(together)
            while together.wait():
                pending.go_on(together)
        except EngineFault as fault:
            broken = fault
            together.wait(broken=True)  # others' engines go on, and decisions need everybody
        if together.given_up:
            raise Preempted
        if pending.wants_parts:  # what is not told here would be run, and scored, again
            together.finish()
        if broken and not enough(together.completions):
            raise broken
        return together.completions


async def _ended(end: Callable[[], Any]) -> None:
    """Ends an environment, whose `close` may be a coroutine function."""
    if inspect.isawaitable(found := end()):
        await found


def _give_up() -> Sequence[Rollout | None]:
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

    def _ask(self, pending: PendingRequests) -> dict[int, Rollout]:
        return self._patiently(lambda: EnginePool._ask(self, pending))

    def _asked_to_stop(self) -> Stop:
        return preemption.asked

    def _announcements(self, name: str) -> Announcements | None:
        return None  # the others ask nothing

    def _ask_until(self, pending: PendingRequests, enough: Enough) -> Sequence[Rollout | None]:
        def found_of(arrived: Mapping[int, Rollout]) -> list[Rollout | None]:
            return [arrived.get(place) for place in range(len(pending.tasks))]

        def ask() -> list[Rollout | None]:
            arrived: dict[int, Rollout] = {}

            def suffices() -> bool:
                arrived.update(pending.judging.ready())
                return enough(found_of(arrived))

            whole = pending.go_on(lambda: suffices() or preemption.asked())
            if whole and not pending.judging.settled(preemption.asked):
                return found_of(pending.judging.ready())
            return found_of(pending.judging.scored() if whole else arrived)

        completions = _agreed(lambda: self._patiently(ask))
        own = {task: rollout for task, rollout in enumerate(completions) if rollout is not None}
        where, rollouts, _ = gathered(own if self.speaks else {}, self.host)
        found = in_order(where, rollouts, len(pending.tasks))
        if None in found.places and not enough(found):
            raise Preempted
        return found

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
