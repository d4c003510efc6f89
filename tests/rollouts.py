"""Rollouts of one turn, as an engine would give them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftmega.core.types import Completion, Prompt, Rollout, Sampling, Trajectory
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.rollout.engines import Engine, ScriptedEngine
from rftmega.rollout.pool.engine_pool import EnginePool
from rftmega.rollout.requests import Requests
from rftmega.runtime.parallel.process_group import World

NEVER = 10**6  # a stop token for scripted servers, which answer with their prompt's tokens


def save_scripted(folder: Path) -> None:
    """Writes the config.json of a scripted server's model; all ranks read it, so none writes it."""
    (folder / "config.json").write_text('{"model_type": "scripted"}')


def rollout_of(prompt: Prompt, completion: Completion, scores: Any = None) -> Rollout:
    return Rollout((Trajectory.of(prompt.token_ids, completion),), scores)


def answered(
    ids: Sequence[int],
    logprobs: Sequence[float] = (),
    reason: Any = "stop",
    version: int = 0,
    *,
    scores: Any = None,
) -> Rollout:
    """The answer to some prompt."""
    completion = Completion(tuple(ids), tuple(logprobs), reason, version)
    return rollout_of(Prompt((1,)), completion, scores)


def response_of(rollout: Rollout) -> tuple[int, ...]:
    return tuple(rollout.response_ids)


class ListEngine:
    """Answers each prompt with the next of its completions."""

    def __init__(self, *completions: Completion):
        self.left = list(completions)

    def generate(self, prompts: Sequence[Prompt], **asked: Any) -> list[Rollout | None]:
        return [rollout_of(prompt, self.left.pop(0)) for prompt in prompts]

    def weight_sync(self, shards: Any, *, bucket_bytes: int) -> Any: ...

    def close(self) -> None: ...


def completion_of(rollout: Rollout) -> Completion:
    """The answer of a rollout of one turn, without its scores."""
    (trajectory,) = rollout.trajectories
    begin = trajectory.prompt_length
    versions = trajectory.versions[begin:].tolist()
    return Completion(
        response_of(rollout),
        tuple(trajectory.logprobs[begin:].tolist()),
        "length" if rollout.truncated else "stop",
        versions[-1] if versions else -1,
    )


def pool_of(
    engine: Engine,
    phases: Any,
    world: World,
    weights: Any,
    *,
    kind: Any = EnginePool,
    **settings: Any,
) -> EnginePool:
    """A pool whose engines get `weights` after a fault."""
    pool = kind(engine, phases, world, SingleTurnEnvironment(), **settings)
    pool.weights = weights
    return pool  # type: ignore[no-any-return]


class Alone(ScriptedEngine):
    """The only engine of a run, whose scores are left to whoever asks."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        **asked: Any,
    ) -> Any:
        found = super().generate(prompts, seeds=seeds, sampling=sampling)
        return [
            rollout_of(prompt, completion)
            for prompt, completion in zip(prompts, found, strict=True)
        ]


class Wrapped:
    """Requests of others, with something done beside."""

    def __init__(self, requests: Requests, stopped: Any = None, finished: Any = None):
        self.take = requests.take
        self.finished = finished or requests.finished
        self.stopped = stopped or requests.stopped
        self.wants_parts, self.broken_off = requests.wants_parts, requests.broken_off
