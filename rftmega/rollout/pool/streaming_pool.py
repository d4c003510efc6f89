"""Asynchronous training: a pool of servers that generate continuously, also while the trainer
trains.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rftmega.core.errors import EngineFault, Preempted
from rftmega.core.interfaces import Enough, LateWeights, Reward, RolloutGroup, TakenGroups
from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.rollout.pool.engine_pool import ServerPool
from rftmega.rollout.pool.gathered_rollouts import gathered, in_order
from rftmega.rollout.pool.rollout_runner import Begun, RolloutRunner
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.rollout.servers.server_group_client import ServerGroupClient
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.collectives import gather_objects

THERE, STOPPED, STRANDED, LATE = "there", "stopped", "stranded", "late"  # how a wait ends
LATE_SECONDS = 10.0  # between two pushes to late servers; doubled after each failure
OTHERS = -1  # groups that are no tasks of the run get numbers below this


class StreamingPool(ServerPool):
    """StreamingPool is a RolloutEngine and a RolloutStream on the same servers: groups of rollouts
    run independently of the trainer, which takes groups that have ended.

    The first process of the run sends the requests of the groups; all processes know which groups
    are in progress.
    """

    pauses_between_takes = False

    def __init__(self, engine: ServerEngine, *arguments: Any, reward_limit: float, **options: Any):
        """Builds the pool; a collective. On the first process, starts the thread that runs rollouts
        (RolloutRunner). `arguments` and `options`: see EnginePool. `reward_limit`: seconds that a
        reward may take.
        """
        super().__init__(engine, *arguments, reward_limit=reward_limit, **options)
        self._under_way: dict[int, RolloutGroup] = {}
        self._others = OTHERS
        self._server_group = engine.server_group
        self._late_tried, self._late_wait = -math.inf, LATE_SECONDS
        self._runner: RolloutRunner | None = None
        if self.speaks:
            self._runner = RolloutRunner(
                ServerGroupClient(engine),
                self.environment,
                row_tokens=engine.row_tokens,
                repeats=self.repeats,
                most_running=self.most_running,
                reward_limit=reward_limit,
                loop=self._loop,
            )

    @property
    def under_way(self) -> Sequence[RolloutGroup]:
        return [group for number, group in self._under_way.items() if number > OTHERS]

    def begin(
        self, groups: Sequence[RolloutGroup], *, sampling: Sampling, reward: Reward | None
    ) -> None:
        for group in groups:
            self._under_way[group.number] = group
            if self._runner is not None:
                self._runner.begin(Begun(group, sampling, reward))

    def take(self, most: int) -> TakenGroups:
        def first(ended: Collection[int]) -> list[int]:
            return [number for number in ended if number > OTHERS][:most]

        return self._taken(first, most)

    def take_these(self, numbers: Sequence[int]) -> TakenGroups:
        def wanted(ended: Collection[int]) -> list[int]:
            return [number for number in numbers if number in ended]

        return self._taken(wanted, len(numbers))

    def join(self) -> None:
        numbers = {group.number for group in self.under_way}
        # not to late servers: the trainer's weights are newer than the last push
        self._wait(lambda ended: numbers <= set(ended), late=False)

    def drop(self, oldest: int) -> Sequence[RolloutGroup]:
        found = [] if self._runner is None else self._runner.before(oldest)
        (numbers, *_) = gather_objects([number for number in found if number > OTHERS])
        if self._runner is not None:
            for number in numbers:
                self._runner.drop(number)
        return [self._under_way.pop(number) for number in numbers]

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
        """Generates and scores one rollout per prompt (see EnginePool.generate), for example in an
        evaluation, while the groups in progress continue. `enough` must be None; `expected_lengths`
        is not used.
        """
        assert enough is None, "validation refuses what would ask for it"
        groups = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            self._others -= 1
            groups.append(RolloutGroup(self._others, prompt, (seed,)))
        self.begin(groups, sampling=sampling, reward=reward)
        return self.take_these([group.number for group in groups]).rollouts

    def ended(self) -> dict[int, list[Rollout]]:
        """Returns the rollouts of ended groups that were not taken yet, by group number; {} except
        on the first process.
        """
        if self._runner is None:
            return {}
        ended = self._runner.ended()
        return {number: found for number, found in ended.items() if number in self._under_way}

    def put(self, group: RolloutGroup, rollouts: Sequence[Rollout]) -> None:
        """Adds a group with its rollouts after a resume: it had already ended when the run was
        saved.
        """
        self._under_way[group.number] = group
        if self._runner is not None:
            self._runner.put(group.number, list(rollouts))

    def forget(self, numbers: Sequence[int]) -> Sequence[RolloutGroup]:
        """Removes the groups with these numbers, whether ended or in progress, and returns them."""
        if self._runner is not None:
            for number in numbers:
                self._runner.drop(number)
        return [self._under_way.pop(number) for number in numbers]

    def unfinished(self) -> Callable[[], dict[str, Any]]:
        return dict

    def load_unfinished(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        super().close()

    def _taken(self, which: Callable[[Collection[int]], list[int]], most: int) -> TakenGroups:
        self._wait(lambda ended: len(which(ended)) == most)
        own: dict[int, Rollout] = {}
        numbers: list[int] = []
        if self._runner is not None:
            numbers = which(self._runner.ended())
            found = [rollout for number in numbers for rollout in self._runner.take(number)]
            own = dict(enumerate(found))
        where, rollouts, told = gathered(own, self.host, numbers)
        groups = [self._under_way.pop(number) for number in told[0][0]]
        count = sum(len(group.seeds) for group in groups)
        return TakenGroups(groups, in_order(where, rollouts, count))

    def _wait(self, enough: Callable[[Collection[int]], bool], *, late: bool = True) -> None:
        """Waits on every process until `enough`, called with the numbers of the ended groups,
        returns True. `late`: whether servers that have joined since the last push get its weights
        during the wait.

        Raises Preempted if the run is asked to stop first, EngineFault if no server is left and
        restarts did not help.
        """

        def wait() -> str:
            if (runner := self._runner) is None:
                return THERE

            def stop() -> bool:
                return preemption.asked() or runner.client.stranded or (late and self._has_late())

            there = runner.wait(enough, stop)
            if preemption.asked():
                return STOPPED
            if there:
                return THERE
            return STRANDED if runner.client.stranded else LATE

        def until_told() -> str:
            while True:
                found = self._patiently(wait) if dist.get_world_size() > 1 else wait()
                (told, *_) = gather_objects(found)
                if told == STRANDED:  # on every process
                    raise EngineFault("No server is left that could answer.")
                if told != LATE:
                    return told
                self._push_to_late()

        if self._over_faults(until_told, lambda: STOPPED) == STOPPED:
            raise Preempted

    def _push_to_late(self) -> None:
        landed = 0
        if isinstance(self.weights, LateWeights):
            landed = self.weights.push_to_late()
            self.phases.rollout()
        # a server that can't take weights costs the trainer time at every attempt
        self._late_wait = LATE_SECONDS if landed else 2 * self._late_wait
        self._late_tried = time.monotonic()

    def _has_late(self) -> bool:
        """Returns whether some servers lack the last push's weights and it is time to push to them:
        LATE_SECONDS after the last attempt, and later after each failure.
        """
        waited = time.monotonic() - self._late_tried
        return waited > self._late_wait and bool(self._server_group.late)
