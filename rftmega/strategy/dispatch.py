"""What makes one engine a process and one trainer a world look like one of each."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from rftmega.megatron import MegatronActor
from rftmega.parallel.launch import World
from rftmega.rollout import Engine
from rftmega.types import Completion, Experience, LossFn, Metrics, Prompt, Rows, TokenStats


class SharedEngine:
    """All engines of the run as one: splits the prompts over them and gives every process every completion."""

    def __init__(self, engine: Engine, world: World, *, processes_per_engine: int):
        self.engine = engine
        self.engines = world.size // processes_per_engine
        self.mine, place = divmod(world.rank, processes_per_engine)
        self.speaks = place == 0  # the processes of one engine have the same answers

    def generate(self, prompts: Sequence[Prompt], *, seeds: Sequence[int], temperature: float) -> list[Completion]:
        """Consecutive requests go to the same engine, so that siblings share the prompt's cache."""
        edges = [len(prompts) * i // self.engines for i in range(self.engines + 1)]
        part = slice(edges[self.mine], edges[self.mine + 1])
        answers = self.engine.generate(prompts[part], seeds=seeds[part], temperature=temperature)
        gathered: list[list[Completion] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, answers if self.speaks else None)
        return [completion for answers in gathered if answers is not None for completion in answers]

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.engine.load_weights(named_tensors, version=version)


class TakingTurns:
    """The policy of a colocated run: before it computes, the engine gives the device's memory back."""

    def __init__(self, actor: MegatronActor, engine: Engine):
        self.actor = actor
        self.engine = engine

    def log_probs(self, rows: Rows) -> TokenStats:
        self.engine.sleep()
        return self.actor.log_probs(rows)

    def reference_log_probs(self, rows: Rows) -> TokenStats:
        self.engine.sleep()
        return self.actor.reference_log_probs(rows)

    def update(self, experience: Experience, loss_fn: LossFn) -> Metrics:
        self.engine.sleep()
        return self.actor.update(experience, loss_fn)
