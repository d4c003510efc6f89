"""Evaluates models with the data, prompts, sampling, rewards and environments of a run."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rftmega.config import RunConfig, changes, without_secrets
from rftmega.core.errors import ConfigError, DataError
from rftmega.core.interfaces import Environment, Reward, WeightSync
from rftmega.core.json_files import read_json_object
from rftmega.core.types import Prompt
from rftmega.data.records import value_at
from rftmega.data.splits import held_out_of
from rftmega.data.tokenizer import Tokenizer
from rftmega.environments import create as environments
from rftmega.monitoring.observers.assemble import answering_of
from rftmega.monitoring.observers.evaluate import Evaluated, EvaluationRequest, completed
from rftmega.monitoring.observers.output_files import writing
from rftmega.rewards import Reasoning, check_prompts, create
from rftmega.rewards.vote import canonical
from rftmega.rollout.pool.engine_pool import EnginePool, ServerPool
from rftmega.run.evaluation.folder_weights import FolderWeights
from rftmega.run.evaluation.options import Candidate
from rftmega.run.evaluation.results import as_json, estimates, grouped, run_metrics
from rftmega.run.evaluation.store import Key, Store, StoredCompletion
from rftmega.run.placement import engines
from rftmega.run.placement.phases import DevicePhases
from rftmega.run.process import joined
from rftmega.run.train import tokenizer_of
from rftmega.runtime import device
from rftmega.runtime.parallel.process_group import World
from rftmega.runtime.parallel.seeds import set_seed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST = 1024  # completions that are stored together
# options that may differ when an evaluation goes on: they change how many completions there are
FREE = ("trainer.eval_samples", "trainer.eval_pass_at")
log = logging.getLogger(__name__)


class EvaluationTask(NamedTuple):
    """EvaluationTask holds the prompts, the environment and the reward of an evaluation."""

    config: RunConfig
    tokenizer: Tokenizer
    environment: Environment
    reward: Any  # rewards.MixedReward
    reasoning: Reasoning
    prompts: Mapping[str, Sequence[Prompt]]
    groups: Mapping[tuple[str, int], str]  # (set, index of the prompt) -> value of the column

    @classmethod
    def read(cls, config: RunConfig, by: str, *, columns: bool = False) -> "EvaluationTask":
        """Reads the data and builds the reward, as a run does; no model is needed. `by`: column of
        the data by which prompts are grouped; "": no groups. `columns`: whether prompts keep the
        columns of their records.

        Raises ConfigError or DataError for a reward or data that can't be used.
        """
        tokenizer = tokenizer_of(config, environments.specs_of(config.environment))
        environment = environments.create(config.environment, tokenizer)

        def check(prompts: Sequence[Prompt]) -> None:
            check_prompts(config.reward, prompts)
            environments.check(environment, prompts)

        prompts = held_out_of(config, tokenizer, check=check, columns=columns or bool(by))
        reasoning = Reasoning.of(config.reward.reasoning_markers, tokenizer)
        reward = create(config.reward, tokenizer.decode, reasoning)
        groups = {
            (name, prompt.index): group_of(prompt, by) if by else ""
            for name, own in prompts.items()
            for prompt in own
        }
        return cls(config, tokenizer, environment, reward, reasoning, prompts, groups)

    def requests(self) -> list[EvaluationRequest]:
        """Returns all completions to generate, prompt by prompt."""
        return [
            EvaluationRequest(name, prompt, sample)
            for name, own in self.prompts.items()
            for prompt in own
            for sample in range(self.config.trainer.eval_samples)
        ]

    def voted(self, found: Evaluated) -> str | None:
        """Returns a completion's vote for maj@k: the final answer that the reward component of
        trainer.eval_accuracy extracts, in canonical form. Returns None if there is no answer.
        """
        if found.rollout.lost:
            return None
        read = self.reasoning.read(found.rollout.context_ids, found.rollout.response_ids)
        if read.graded is None:
            return None
        extracted = self.reward.extractors.get(self.config.trainer.eval_accuracy)
        return canonical(extracted(read.graded)) if extracted else None


def group_of(prompt: Prompt, by: str) -> str:
    """Returns the value of the column `by` of a prompt's record, as text. Raises DataError if the
    record lacks it.
    """
    record = json.loads(prompt.record)
    value = value_at(record, by)
    if value is None:
        raise DataError(
            f"--by {by}: prompt {prompt.index} has no such column. Its columns: {', '.join(record)}."
        )
    return value if isinstance(value, str) else json.dumps(value)


class Stage:
    """Stage holds one engine for all evaluated models; `push` replaces the engine's weights."""

    def __init__(self, task: EvaluationTask, world: World, weights: FolderWeights):
        """Builds the engine, which has no weights before the first `push`."""
        config, self.weights = task.config, weights
        set_seed(config.trainer.seed)
        engine = engines.create(
            config,
            world,
            vocabulary=weights.description.vocabulary,
            stop_ids=[*task.tokenizer.stop_ids, *getattr(task.environment, "stop_ids", ())],
            experts=weights.description.experts,
        )
        face: Any = ServerPool if config.strategy == "separate" else EnginePool
        self.pool: EnginePool = face(
            engine,
            DevicePhases({}, offload=False),
            world,
            task.environment,
            processes_per_engine=world.size,
            restarts=config.faults.engine_restarts,
            reward_limit=config.reward.timeout,
            repeats=config.faults.rollout_repeats,
            most_running=config.rollout.max_running,
        )
        bucket_bytes = config.trainer.push_bucket_mib * 2**20
        self.sync: WeightSync = self.pool.weight_sync(weights.shards, bucket_bytes=bucket_bytes)

    def push(self, candidate: Candidate, adapter: str, version: int) -> None:
        """Sends the weights of a model to the engine. `adapter`: see `FolderWeights.load`."""
        if version or adapter:
            self.weights.load(candidate.folder, adapter)
        self.sync.push(version=version)


def evaluate(
    task: EvaluationTask,
    candidates: Sequence[Candidate],
    adapter: str,
    output: Path,
    *,
    part: int = 0,
) -> list[dict[str, Any]]:
    """Evaluates models on a task. Returns their results, as evaluation.json has them.

    Completions are appended to `output`/completions/<model>.jsonl, `part` at a time (0: some times
    as many as the engine generates at once), and completions that are there already are not
    generated again. `adapter`: PEFT folder of LoRA adapters that are added to the model; "": none.
    """
    stores = [
        Store(output / "completions" / f"{each.label}.jsonl", task.tokenizer.decode)
        for each in candidates
    ]
    known = [store.read() for store in stores]
    requests = task.requests()
    missing = [[each for each in requests if _key(each) not in found] for found in known]
    if any(missing):
        size = part or min(MOST, 4 * task.config.rollout.max_batch)
        with _staged(task, candidates[0].folder) as stage:
            for number, (candidate, store) in enumerate(zip(candidates, stores, strict=True)):
                if missing[number]:
                    stage.push(candidate, adapter, number)
                for begin in range(0, len(missing[number]), size):
                    asked = missing[number][begin : begin + size]
                    known[number] |= _answered(task, stage, asked, store, candidate)
                    done = len(requests) - len(missing[number]) + begin + len(asked)
                    log.info("%s: %d of %d completions", candidate.label, done, len(requests))
    return [result(task, *each) for each in zip(candidates, known, strict=True)]


@contextmanager
def _staged(task: EvaluationTask, folder: str) -> Iterator[Stage]:
    with joined(task.config) as (world, _):
        chosen = DTYPES.get(task.config.model.dtype, device.current().train_dtype)
        stage = Stage(task, world, FolderWeights(folder, chosen))
        try:
            yield stage
        finally:
            stage.pool.close()


def _answered(
    task: EvaluationTask,
    stage: Stage,
    asked: Sequence[EvaluationRequest],
    store: Store,
    candidate: Candidate,
) -> dict[Key, StoredCompletion]:
    sampling = answering_of(task.config).sampling
    reward: Reward = task.reward
    found = completed(stage.pool, asked, sampling, reward)
    return store.add([(each, task.voted(each)) for each in found], candidate.step)


def _key(asked: EvaluationRequest) -> Key:
    return asked.name, asked.prompt.index, asked.sample


def result(
    task: EvaluationTask, candidate: Candidate, known: Mapping[Key, StoredCompletion]
) -> dict[str, Any]:
    """Returns the results of one model as a JSON-serializable object. `known`: its completions."""
    answering = answering_of(task.config)
    sets, metrics = {}, dict[str, float]()
    for name, prompts in task.prompts.items():
        own = [
            [known[name, prompt.index, sample] for sample in range(answering.samples)]
            for prompt in prompts
        ]
        metrics |= run_metrics(name, own, answering)
        groups = grouped(own, lambda each: task.groups[each.key[:2]])
        sets[name] = {
            "all": as_json(estimates(own, answering)),
            "groups": {
                group: as_json(estimates(each, answering))
                for group, each in groups.items()
                if group
            },
        }
    said = {"model": candidate.label, "folder": candidate.folder, "step": candidate.step}
    return {**said, "metrics": metrics, "sets": sets}


def begin(output: Path, config: RunConfig, sources: Mapping[str, Any]) -> None:
    """Writes the options and inputs of the evaluation to `output`/request.json. Raises ConfigError
    if `output` belongs to an evaluation with other options or inputs. `sources`: checksums of the
    input files and the models.
    """
    path = output / "request.json"
    request = {"options": without_secrets(config), "inputs": dict(sources)}
    if path.is_file():
        before = read_json_object(path, raising=ConfigError)
        found = [
            line
            for line in changes(before["options"], request["options"])
            if not line.startswith(tuple(f"{name}: " for name in FREE))
        ]
        found += [
            f"{name} has changed"
            for name in sorted(before["inputs"].keys() | request["inputs"].keys())
            if before["inputs"].get(name) != request["inputs"].get(name)
        ]
        if found:
            raise ConfigError.listing(
                f"{output} holds an evaluation of something else. Give another --output, or delete it. What differs",
                found,
            )
    with writing(path):
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(request, indent=2) + "\n")
