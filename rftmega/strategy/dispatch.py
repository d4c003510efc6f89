"""What makes one engine a process and one trainer a world look like one of each."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega import device
from rftmega.interfaces import Enough, Reward, WeightSync
from rftmega.megatron import MegatronActor, MegatronCritic
from rftmega.megatron.offload import PARAMETERS, PARTS, Residency
from rftmega.parallel.launch import World
from rftmega.parallel.progress import mark
from rftmega.rollout import Engine
from rftmega.rollout.order import shares
from rftmega.strategy.early_stop import Together
from rftmega.strategy.judging import Judging
from rftmega.strategy.memory import Memory, Predicted
from rftmega.types import Auxiliary, Completion, Experience, LossFn, Metrics, Prompt, Rows, TokenStats

PATIENCE = 10.0  # seconds
POLICY = "policy"
Result = TypeVar("Result")


class Turns:
    """Who holds the device's memory in which phase of a colocated run: the trainer's parts, the engine, or both's weights."""

    def __init__(
        self, models: Mapping[str, Residency], engine: Engine | None, *, offload: bool, predicted: Predicted | None = None
    ):
        """`models` by name, "policy" among them. Without `offload` they keep everything, always; `engine` is None where it has
        devices of its own. `predicted` bytes are told beside those that are measured.
        """
        self.models = models
        self.engine = engine
        self.offload = offload
        self.memory = Memory(models, predicted or {})

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

    def __init__(self, engine: Engine, turns: Turns, world: World, *, processes_per_engine: int):
        self.engine = engine
        self.turns = turns
        self.engines = world.size // processes_per_engine
        self.mine, place = divmod(world.rank, processes_per_engine)
        self.speaks = place == 0  # the processes of one engine have the same answers

    def generate(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], temperature: float, reward: Reward | None = None
    ) -> list[Completion]:
        """Every engine gets requests of about the same expected length, the long ones first (`order.shares`). Each answer is
        scored once, in the process that has it.
        """
        self.turns.rollout()
        parts = shares(prompts, self.engine.lengths.expected(prompts), self.engines)
        mine = parts[self.mine]
        asked, own = [prompts[place] for place in mine], [seeds[place] for place in mine]
        answers = self._ask(asked, own, temperature, reward if self.speaks else None)
        gathered: list[list[Completion] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, answers if self.speaks else None)
        spoken = [answers for answers in gathered if answers is not None]
        pairs = zip(itertools.chain(*parts), itertools.chain(*spoken), strict=True)
        found = [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]
        self.engine.lengths.learn(prompts, found)
        return found

    def generate_until(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None = None,
        enough: Enough,
    ) -> list[Completion | None]:
        """All engines stop after the same number of steps, decided from everybody's answers (`early_stop.Together`)."""
        self.turns.rollout()
        mine = shares(prompts, self.engine.lengths.expected(prompts), self.engines)[self.mine]
        asked, own = [prompts[place] for place in mine], [seeds[place] for place in mine]
        found = self._ask_until(mine, len(prompts), asked, own, temperature, reward if self.speaks else None, enough)
        self.engine.lengths.learn(prompts, found)
        return found

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.engine.load_weights(named_tensors, version=version)

    def state(self) -> dict[str, Any]:
        """How long answers to each prompt are expected to be."""
        return self.engine.lengths.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.engine.lengths.load_state(state)

    def _ask(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, reward: Reward | None
    ) -> list[Completion]:
        if reward is None:
            return self.engine.generate(prompts, seeds=seeds, temperature=temperature)
        with Judging(reward, prompts) as judging:
            self.engine.generate(prompts, seeds=seeds, temperature=temperature, finished=judging.finished)
            return [completion for _, completion in sorted(judging.scored().items())]

    def _ask_until(
        self,
        places: Sequence[int],
        requests: int,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None,
        enough: Enough,
    ) -> list[Completion | None]:
        """All `requests` answers, of which this process's engine is to give those at `places`."""
        with Judging(reward, prompts) as judging:
            together = Together(judging, places if self.speaks else (), requests, enough)
            self.engine.generate_until(prompts, seeds=seeds, temperature=temperature, finished=judging.finished, stop=together)
            together.wait()
            return together.answers


class AskedByOne(SharedEngine):
    """Engines that the first process alone speaks to. The others wait as long as it takes: a collective that began with the
    rollout would time out in a long one. When such engines stop early is decided by time: what has arrived, and was scored.
    """

    def _ask(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, reward: Reward | None
    ) -> list[Completion]:
        return self._patiently(lambda: SharedEngine._ask(self, prompts, seeds, temperature, reward))

    def _ask_until(
        self,
        places: Sequence[int],
        requests: int,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        temperature: float,
        reward: Reward | None,
        enough: Enough,
    ) -> list[Completion | None]:
        def found_of(arrived: Mapping[int, Completion]) -> list[Completion | None]:
            answers: list[Completion | None] = [None] * requests
            for place, answer in arrived.items():
                answers[places[place]] = answer
            return answers

        def ask() -> list[Completion | None]:
            arrived: dict[int, Completion] = {}

            def stop() -> bool:
                arrived.update(judging.ready())
                return enough(found_of(arrived))

            with Judging(reward, prompts) as judging:
                answers = self.engine.generate_until(
                    prompts, seeds=seeds, temperature=temperature, finished=judging.finished, stop=stop
                )
                return found_of(arrived if None in answers else judging.scored())

        found = [self._patiently(ask)]
        dist.broadcast_object_list(found, 0)
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
            return asked.result()


class ColocatedPolicy:
    """The policy of a colocated run: what it needs comes to the device before it computes."""

    def __init__(self, actor: MegatronActor, turns: Turns):
        self.actor = actor
        self.turns = turns

    def log_probs(self, rows: Rows) -> TokenStats:
        self.turns.score()
        return self.actor.log_probs(rows)

    def reference_log_probs(self, rows: Rows) -> TokenStats:
        self.turns.score()
        return self.actor.reference_log_probs(rows)

    def update(self, experience: Experience, loss_fn: LossFn, *, auxiliary: Auxiliary | None = None) -> Metrics:
        self.turns.update()
        return self.actor.update(experience, loss_fn, auxiliary=auxiliary)


class ColocatedValues:
    """A value model likewise, under the `name` that Turns knows it by."""

    def __init__(self, model: MegatronCritic, turns: Turns, name: str):
        self.model, self.turns, self.name = model, turns, name

    def values(self, rows: Rows) -> Tensor:
        self.turns.score(self.name)
        return self.model.values(rows)

    def update(self, experience: Experience, loss_fn: LossFn) -> Metrics:
        self.turns.update(self.name)
        return self.model.update(experience, loss_fn)


class ColocatedWeights:
    """The weight transfer of a colocated run."""

    def __init__(self, weights: WeightSync, turns: Turns):
        self.weights = weights
        self.turns = turns

    def push(self, *, version: int) -> Metrics:
        self.turns.push()
        metrics = self.weights.push(version=version)
        self.turns.memory.end(push_buffers=int(metrics["push_buffer_bytes"]))
        return metrics | self.turns.memory.metrics
