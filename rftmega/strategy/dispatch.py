"""What makes one engine a process and one trainer a world look like one of each."""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega import device
from rftmega.device.spans import recorder
from rftmega.errors import EngineFault, GivenUp
from rftmega.interfaces import Enough, Reward, WeightSync
from rftmega.megatron import MegatronActor, MegatronCritic
from rftmega.megatron.offload import PARAMETERS, PARTS, Residency
from rftmega.megatron.passes import at_once
from rftmega.parallel import stop
from rftmega.parallel.collectives import board, gather_objects, neighbours
from rftmega.parallel.launch import World
from rftmega.parallel.progress import mark
from rftmega.rollout import Engine
from rftmega.rollout.base import Stop
from rftmega.rollout.order import Order, ordered
from rftmega.strategy.asking import Asking
from rftmega.strategy.early_stop import EVERY, Together
from rftmega.strategy.memory import Memory, Predicted
from rftmega.strategy.queues import Counted, Dealt, Queue
from rftmega.types import (
    Auxiliary,
    Completion,
    EachStep,
    Experience,
    LossFn,
    Metrics,
    Prompt,
    Rows,
    SliceChecksums,
    TokenStats,
    Told,
)

PATIENCE = 10.0  # seconds
POLICY = "policy"
COUNT = "count of "
COUNTS = ("tokens", "slots", "flops", "bubble", "ideal")
log = logging.getLogger(__name__)
_rollouts = itertools.count()  # of this process; all count alike
Result = TypeVar("Result")


class Turns:
    """Who holds the device's memory in which phase of a colocated run: the trainer's parts, the engine, or both's weights."""

    def __init__(
        self, models: Mapping[str, Residency], *, offload: bool, engine: Engine | None = None, predicted: Predicted | None = None
    ):
        """`models` by name, "policy" among them. Without `offload` they keep everything, always. `engine` may be set once it
        has started; None: it has devices of its own. `predicted` bytes are told beside those that are measured.
        """
        self.models = models
        self.engine = engine
        self.offload = offload
        self.memory = Memory(models, predicted or {})

    def start(self) -> None:
        """The engine starts: vLLM refuses to where less memory is free than it is to have."""
        self._hold("start")
        device.current().release_unused()

    def rollout(self) -> None:
        """The engine works; it wakes by itself."""
        self._hold("rollout")

    def score(self, model: str = POLICY) -> None:
        """A model's weights are read; optimizer state stays where it is."""
        self._engine_sleeps()
        self._hold("score", model, PARAMETERS)

    def update(self, model: str = POLICY) -> None:
        self._engine_sleeps()
        self._hold("update", model, *PARTS)

    def push(self) -> None:
        """Weights move from the policy to the engine."""
        self._hold("push", POLICY, PARAMETERS)

    def _engine_sleeps(self) -> None:
        if self.engine is not None:
            self.engine.sleep()

    def _hold(self, phase: str, model: str = POLICY, *parts: str) -> None:
        mark(phase if model == POLICY else f"{phase}_{model}")
        self.memory.end()
        if self.offload:
            for other in self.models.keys() - {model}:  # who leaves makes room for who comes
                self.models[other].only()
            self.models[model].only(*parts)
        self.memory.begin(phase if model == POLICY else f"{phase}_{model}")


class SharedEngine:
    """All engines of the run as one: splits the prompts over them and gives every process every completion."""

    def __init__(
        self,
        engine: Engine,
        turns: Turns,
        world: World,
        weights: WeightSync,
        *,
        processes_per_engine: int,
        restarts: int,
        reward_limit: float = math.inf,
    ):
        """Engines that break down are restarted, get `weights` again and answer what is left, `restarts` times a generation.
        `reward_limit`: seconds that a reward may take, see Judging.
        """
        self.engine = engine
        self.turns = turns
        self.weights, self.restarts, self.reward_limit = weights, restarts, reward_limit
        self.engines = world.size // processes_per_engine
        self.processes, self.alone = processes_per_engine, processes_per_engine == 1
        self.group = None if self.alone else neighbours(processes_per_engine)
        self.mine, place = divmod(world.rank, processes_per_engine)
        self.speaks = place == 0  # the processes of one engine have the same answers

    def generate(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], temperature: float, reward: Reward | None = None
    ) -> list[Completion]:
        """Every engine begins with requests of about the same expected length, the long ones first, and takes what none has
        begun when it has room (`order.ordered`, `queues.Counted`). Each answer is scored once, in the process that has it. Raises
        on every process EngineFault where restarts did not help, GivenUp where the run is asked to stop: no engine begins
        another step then.
        """
        settings: dict[str, Any] = {"name": f"rollout {next(_rollouts)}", "speaks": self.speaks, "alone": self.alone}
        queue = Counted(self._ordered(prompts), self.mine, board=board(), **settings)
        found: list[Completion | None] = [None] * len(prompts)
        with self._asking(queue, prompts, seeds, temperature, reward) as asking:
            answers = self._over_faults(lambda: self._ask(asking), asking.judging.ready)
            for spoken in gather_objects(answers if self.speaks else {}):
                for place, answer in spoken.items():
                    found[place] = answer
            queue.end()
            if None in found:  # in here nobody waits for scores that are still to come
                raise GivenUp(found)
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
        """All engines stop after the same number of steps, decided from everybody's answers (`early_stop.Together`). Raises
        GivenUp, with no answers, where the run is asked to stop.
        """
        queue = Dealt(self._ordered(prompts), self.mine, slots=self.engine.slots)
        with self._asking(queue, prompts, seeds, temperature, reward) as asking:
            found = self._over_faults(lambda: self._ask_until(asking, queue, enough), _give_up)
        self.learn(prompts, found)
        return found

    def state(self) -> dict[str, Any]:
        """How long answers to each prompt are expected to be."""
        return self.engine.lengths.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.engine.lengths.load_state(state)

    def learn(self, prompts: Sequence[Prompt], completions: Sequence[Completion | None]) -> None:
        self.engine.lengths.learn(prompts, completions)

    def _ordered(self, prompts: Sequence[Prompt]) -> Order:
        """An engine that there is nobody beside begins all of them itself."""
        slots = self.engine.slots if self.engines > 1 else len(prompts)
        return ordered(prompts, self.engine.lengths.expected(prompts), self.engines, slots)

    def _asking(
        self, queue: Queue, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, reward: Reward | None
    ) -> Asking:
        spoken = reward if self.speaks else None
        limit = self.reward_limit
        return Asking(self.engine, prompts, seeds, temperature, spoken, queue, agree=self._agree, reward_limit=limit)

    def _agree(self, places: list[int]) -> list[int]:
        """What the first process of this engine says: one that broke down may have got further than another."""
        return places if self.alone else gather_objects(places, self.group)[0]

    def _over_faults(self, work: Callable[[], Result], given_up: Callable[[], Result]) -> Result:
        """What comes of `work`, which is called again, everywhere, when an engine broke down and all of them hold weights; of
        `given_up` where the run is asked to stop by then: engines may have got the same signal.
        """
        version, again = self.engine.version, 0
        while True:
            try:
                if again:
                    assert version is not None, "without weights it would not have got so far"
                    _agreed(self.engine.restart)
                    self.weights.push(version=version)
                self.turns.rollout()
                return _agreed(work)
            except EngineFault as fault:
                if stop.agreed():
                    return given_up()
                if again == self.restarts:
                    raise EngineFault(f"{fault} (faults.engine_restarts={self.restarts} did not help.)") from fault
                if dist.get_rank() == 0:
                    log.warning("engines start again (%d of %d), for what is unanswered: %s", again + 1, self.restarts, fault)
                again += 1

    def _ask(self, asking: Asking) -> dict[int, Completion]:
        """Place -> answer; where the run is asked to stop, of those that have their scores by then."""
        whole = asking.go_on(self._asked_to_stop()) and asking.judging.settled(stop.asked)
        return asking.judging.scored() if whole else asking.judging.ready()

    def _asked_to_stop(self) -> Stop:
        """For one rollout. The processes of one engine go step by step together, so they must end at the same step."""
        steps = itertools.count(1)
        return stop.asked if self.alone else lambda: next(steps) % EVERY == 0 and stop.agreed(self.group)

    def _ask_until(self, asking: Asking, queue: Dealt, enough: Enough) -> list[Completion | None]:
        """The answers to all requests, of which this process's engine is to give those that the queue gives it."""
        settings: dict[str, Any] = {"speaks": self.speaks, "processes": self.processes}
        together = Together(asking.judging, queue, len(asking.prompts), enough, **settings)
        broken: EngineFault | None = None
        try:
            asking.go_on(together)
            while together.wait():
                asking.go_on(together)
        except EngineFault as fault:
            broken = fault
            together.wait(broken=True)  # others' engines go on, and decisions need everybody
        if together.given_up:
            raise GivenUp
        if broken and not enough(together.answers):
            raise broken
        return together.answers


def _give_up() -> list[Completion | None]:
    raise GivenUp


def _agreed(work: Callable[[], Result]) -> Result:
    """What comes of what every process does. Raises EngineFault on all of them where it was raised on one."""
    try:
        told, result = "", work()
    except EngineFault as fault:
        told = str(fault)
    if faults := list(filter(None, gather_objects(told))):
        raise EngineFault(faults[0])
    return result


class AskedByOne(SharedEngine):
    """Engines that the first process alone speaks to. The others wait as long as it takes: a collective that began with the
    rollout would time out in a long one. When such engines stop early is decided by time: what has arrived, and was scored.
    """

    def _ask(self, asking: Asking) -> dict[int, Completion]:
        return self._patiently(lambda: SharedEngine._ask(self, asking))

    def _asked_to_stop(self) -> Stop:
        return stop.asked

    def _agree(self, places: list[int]) -> list[int]:
        return places  # who asks is alone

    def _ask_until(self, asking: Asking, queue: Dealt, enough: Enough) -> list[Completion | None]:
        def found_of(arrived: Mapping[int, Completion]) -> list[Completion | None]:
            return [arrived.get(place) for place in range(len(asking.prompts))]

        def ask() -> list[Completion | None]:
            arrived: dict[int, Completion] = {}

            def suffices() -> bool:
                arrived.update(asking.judging.ready())
                return enough(found_of(arrived))

            whole = asking.go_on(lambda: suffices() or stop.asked())
            if whole and not asking.judging.settled(stop.asked):
                return found_of(asking.judging.ready())
            return found_of(asking.judging.scored() if whole else arrived)

        found = [_agreed(lambda: self._patiently(ask))]
        dist.broadcast_object_list(found, 0)
        if None in found[0] and not enough(found[0]):
            raise GivenUp
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
                    stop.asked()  # tells it
            return asked.result()


def _with_counts(each: EachStep) -> EachStep:
    """What an optimizer step counts travels with its metrics: one that was done before a resume is counted after it."""

    def each_with_counts(step: Callable[[], Metrics]) -> Metrics:
        done_now = False

        def counting() -> Metrics:
            nonlocal done_now
            done_now, before = True, {name: recorder.counted(name) for name in COUNTS}
            metrics = step()
            return metrics | {COUNT + name: recorder.counted(name) - before[name] for name in COUNTS}

        metrics = each(counting)
        if not done_now:
            for name in COUNTS:
                recorder.count(name, metrics[COUNT + name])
        return {name: value for name, value in metrics.items() if not name.startswith(COUNT)}

    return each_with_counts


class ColocatedPolicy:
    """The policy of a colocated run: what it needs comes to the device before it computes."""

    def __init__(self, actor: MegatronActor, turns: Turns):
        self.actor = actor
        self.turns = turns

    def log_probs(self, rows: Rows, *, temperature: float | None = None) -> TokenStats:
        self.turns.score()
        return self.actor.log_probs(rows, temperature=temperature)

    def reference_log_probs(self, rows: Rows) -> TokenStats:
        self.turns.score()
        return self.actor.reference_log_probs(rows)

    def update(
        self,
        experience: Experience,
        loss_fn: LossFn,
        *,
        auxiliary: Auxiliary | None = None,
        each: EachStep = at_once,
        scored: Told | None = None,
    ) -> Metrics:
        self.turns.update()
        return self.actor.update(experience, loss_fn, auxiliary=auxiliary, each=_with_counts(each), scored=scored)


class ColocatedValues:
    """A value model likewise, under the `name` that Turns knows it by."""

    def __init__(self, model: MegatronCritic, turns: Turns, name: str):
        self.model, self.turns, self.name = model, turns, name

    def values(self, rows: Rows) -> Tensor:
        self.turns.score(self.name)
        return self.model.values(rows)

    def update(self, experience: Experience, loss_fn: LossFn, *, each: EachStep = at_once) -> Metrics:
        self.turns.update(self.name)
        return self.model.update(experience, loss_fn, each=_with_counts(each))


class ColocatedWeights:
    """The weight transfer of a colocated run."""

    def __init__(self, weights: WeightSync, turns: Turns):
        self.weights = weights
        self.turns = turns

    def push(self, *, version: int) -> Metrics:
        self.turns.push()
        metrics = self.weights.push(version=version)
        self.turns.memory.end(push_buffers=int(metrics["push_buffer_bytes"]))
        return metrics | self.turns.memory.take()

    def checksums(self) -> list[SliceChecksums]:
        self.turns.push()
        return self.weights.checksums()
