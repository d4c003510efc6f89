"""EnginePool presents the engines of all processes as one RolloutEngine.

It distributes requests by expected length, gathers the rollouts on every process, and restarts
engines that broke down.
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
_rollouts = itertools.count()  # counter of this process, equal on all processes
Result = TypeVar("Result")


class EnginePool:
    """EnginePool presents all engines of the run as one RolloutEngine: it distributes the tasks
    (one prompt with a seed per rollout) over the engines and returns all rollouts on every process.
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
        """Builds the pool; a collective. Engines that break down are restarted, get the weights
        again and generate the missing completions, up to `restarts` times per call of `generate`.

        `engine`: this process's engine; `phases`: switches the device's memory between trainer and
        engine; `environment`: runs the rollouts; `processes_per_engine`: number of consecutive
        ranks that share an engine. `reward_limit`: seconds that a reward may take for a batch of
        rollouts. `repeats`: how often a rollout is run again after an InfrastructureFault, before
        it is lost. `most_running`: most concurrent rollouts per engine, including rollouts that
        wait for tools.
        """
        self.repeats, self.most_running = repeats, most_running
        self.engine, self.phases, self.environment = engine, phases, environment
        self.weights: WeightSync | None = None
        self._loop = asyncio.new_event_loop()  # the environment's, for the whole run
        self.restarts, self.reward_limit = restarts, reward_limit
        self.engines = world.size // processes_per_engine
        self.processes, self.alone = processes_per_engine, processes_per_engine == 1
        self.group = None if self.alone else neighbours(processes_per_engine)
        self.mine, place = divmod(world.rank, processes_per_engine)
        self.speaks = place == 0  # the engine's other processes follow its first process
        self.host = host_memory.current()

    def weight_sync(
        self, shards: Sequence[Shard], *, bucket_bytes: int, rounds: bool = False
    ) -> WeightSync:
        """Returns the WeightSync that pushes the policy's weights to all engines; a collective.
        `shards`: the local tensors of the policy; `bucket_bytes`: most bytes that are sent at a
        time; `rounds`: whether adapters are merged into lower-precision weights, so that a push
        reports the rounding loss.
        """
        sync = self.engine.weight_sync(shards, bucket_bytes=bucket_bytes)
        self.weights = ColocatedWeights(
            sync, self.phases, shards if rounds else None, engine=self.engine
        )
        return self.weights

    def adapter_sync(
        self, frozen: Sequence[Shard], adapters: AdapterSource, *, bucket_bytes: int
    ) -> WeightSync:
        """Returns the WeightSync that pushes a frozen model and its LoRA adapters separately; a
        collective. `frozen`: the local tensors of the model; `adapters`: source of the adapters'
        tensors; `bucket_bytes`: most bytes that are sent at a time.
        """
        sync = self.engine.adapter_sync(frozen, adapters, bucket_bytes=bucket_bytes)
        self.weights = ColocatedWeights(sync, self.phases, engine=self.engine)
        return self.weights

    def close(self) -> None:
        """Closes the environment and this process's engine; called before the process groups are
        destroyed.
        """
        try:
            if end := getattr(self.environment, "close", None):
                self._loop.run_until_complete(_ended(end))
            self._loop.close()
        finally:
            self.engine.close()

    @contextmanager
    def answering_with(self, adapter: str) -> Iterator[None]:
        """Context manager in whose block the engines generate with the adapter named `adapter`
        instead of the policy's adapter.
        """
        self.engine.use_adapter(adapter)
        try:
            yield
        finally:
            self.engine.use_adapter("")

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
        """Generates and scores one rollout per prompt on all engines. Each engine starts with tasks
        of about the same total expected length, longest first, and takes further tasks when it has
        room (`requests.order.ordered`, `request_queues`). Each rollout is scored once, in the
        process that ran it.

        `seeds`: one per prompt; `expected_lengths`: expected tokens of each completion, to balance
        the engines, by default the prompts' lengths. With `enough`, all engines stop after the same
        number of steps, as soon as `enough`, called with all rollouts so far (None for unfinished
        ones), returns True (`stop_consensus.StopConsensus`).

        Raises EngineFault on every process if restarts did not help, and Preempted if the run is
        asked to stop: no engine begins another step then. Without `enough`, Preempted has the
        rollouts so far.
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
        """Generates rollouts of `tasks` as `generate` does. With `partials`, continues the partial
        completions in it and records the completions that are interrupted now.
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
            # after a collective: every process has finished
            if announced is not None:
                announced.end()
            queue.end()
            if (
                enough is None and None in found.places
            ):  # inside the context, which cancels pending scores at its end
                raise Preempted(found)
        return found

    def _announcements(self, name: str) -> Announcements | None:
        """Returns the channel `name` from this engine's first process to its other processes; None
        if the engine has only one process.
        """
        return None if self.alone else Announcements(board(), name, speaks=self.speaks)

    def _ordered(self, tasks: Tasks) -> RequestOrder:
        """Returns the order in which the engines begin the tasks. If there is only one engine, it
        begins all tasks at once.
        """
        slots = self.engine.slots if self.engines > 1 else len(tasks)
        return ordered(tasks.prompts, tasks.expected_lengths, self.engines, slots)

    def _all(self, pending: PendingRequests) -> RolloutArrays:
        """Generates until all tasks have ended and returns their rollouts. `pending`: the tasks,
        and this engine's part of their rollouts. If the run is asked to stop, returns only the
        rollouts that have scores by then, and None for the other tasks.
        """
        own = self._over_faults(lambda: self._ask(pending), pending.judging.ready)
        where, rollouts, _ = gathered(own if self.speaks else {}, self.host)
        return in_order(where, rollouts, len(pending.tasks))

    def _until(self, pending: PendingRequests, enough: Enough) -> RolloutArrays:
        found = self._over_faults(lambda: self._ask_until(pending, enough), _give_up)
        return shared(found, self.host)

    def _over_faults(self, work: Callable[[], Result], given_up: Callable[[], Result]) -> Result:
        """Calls `work` on all processes and returns its result. After an engine fault, restarts all
        engines, pushes the weights again and repeats the call, up to `restarts` times. If the run
        is asked to stop by the time of a fault, returns the result of `given_up` instead: the
        signal may have ended the engines, too.
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
        """Runs this engine's share of the tasks in `pending` until all have ended. Returns its
        rollouts by task index; if the run is asked to stop, only rollouts that have scores.
        """
        whole = pending.go_on(self._asked_to_stop()) and pending.judging.settled(preemption.asked)
        return pending.judging.scored() if whole else pending.judging.ready()

    def _asked_to_stop(self) -> Stop:
        """Returns a function that is called after each engine step and returns whether the run is
        asked to stop. It returns True at the same step on all processes of an engine, since they
        must step together.
        """
        steps = itertools.count(1)
        return (
            preemption.asked
            if self.alone
            else lambda: next(steps) % EVERY == 0 and preemption.agreed(self.group)
        )

    def _ask_until(self, pending: PendingRequests, enough: Enough) -> Sequence[Rollout | None]:
        """Generates until `enough` returns True for the rollouts of all engines so far. Returns a
        rollout per task, None where there is none. `pending`: the tasks; its queue assigns this
        engine's part of them.
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
            together.wait(broken=True)  # other engines continue, and decisions are collective
        if together.given_up:
            raise Preempted
        if pending.wants_parts:  # rollouts not shared here would be run and scored again
            together.finish()
        if broken and not enough(together.completions):
            raise broken
        return together.completions


async def _ended(end: Callable[[], Any]) -> None:
    """Closes an environment. `end`: its `close` method, which may be a coroutine function."""
    if inspect.isawaitable(found := end()):
        await found


def _give_up() -> Sequence[Rollout | None]:
    raise Preempted


def _agreed(work: Callable[[], Result]) -> Result:
    """Calls `work` on every process and returns this process's result; a collective.

    Raises EngineFault on all processes if `work` raised EngineFault on any of them.
    """
    try:
        told, result = "", work()
    except EngineFault as fault:
        told = str(fault)
    if faults := list(filter(None, gather_objects(told))):
        raise EngineFault(faults[0])
    return result


class ServerPool(EnginePool):
    """ServerPool presents servers as one RolloutEngine. Only the first process of the run connects
    to the servers. The others learn by short collectives whether the rollouts are there, since one
    collective over a whole generation would time out.

    With `enough`, generation stops as soon as the scored rollouts that have arrived suffice, so the
    result depends on timing.
    """

    def _ask(self, pending: PendingRequests) -> dict[int, Rollout]:
        return self._patiently(lambda: EnginePool._ask(self, pending))

    def _asked_to_stop(self) -> Stop:
        return preemption.asked

    def _announcements(self, name: str) -> Announcements | None:
        return None  # the other processes send no requests

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
                    mark()  # the first process is alive, and has its own watchdog
                    preemption.asked()  # lets it know of this process's signal
            return asked.result()
