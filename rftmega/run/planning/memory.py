"""Predicts the memory of one process in each phase of a run, by kind, on the device and on the
host.

Phases are those of `placement.phases.DevicePhases`: start (of a colocated engine), rollout, score
(log-probs or values), update (training) and push (weight sync). Phases of a model other than the
policy have the model's name as a suffix: update_critic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rftmega.backends.runner.micro_batches import fewest_micro_batches
from rftmega.config import COLUMNS_OF_A_SCALE, ParallelConfig, RunConfig
from rftmega.config.capabilities import backend_of
from rftmega.core.shards import is_linear
from rftmega.run.planning import activations, engine, sharded, tower
from rftmega.run.planning.activations import Load
from rftmega.run.planning.models import ADAM, GRADIENTS, PARAMETERS, POLICY, PlannedModel
from rftmega.run.planning.states import (
    MOMENTS,
    alone,
    elements_of,
    frozen_bytes,
    shared_bytes,
    states,
)

Bytes = dict[str, int]  # kind (such as "gradients") -> bytes


@dataclass(frozen=True)
class Budget:
    """Budget is the memory of one device in bytes.

    `reserved`: the part of it for CUDA's context, NCCL's buffers and allocator fragmentation.
    """

    memory: float
    reserved: float = 0.0


@dataclass(frozen=True)
class Cache:
    """Cache is the size of the KV cache of one engine."""

    budget: float  # bytes that vLLM may take on each process
    bytes: int  # left for the cache; negative if weights and working memory leave none
    sequences: float  # of maximum length that fit into it at once


def resident(
    models: Mapping[str, PlannedModel], config: RunConfig, world: int, stages: Mapping[str, int]
) -> dict[str, Bytes]:
    """Returns phase -> kind -> bytes that one process keeps on its device in this phase: weights,
    gradients, main parameters and Adam states.

    `models`: the run's models by name; `world`: number of trainer processes; `stages`: model name
    -> pipeline stage of the process.
    """
    held = {
        name: {} if planned.parallel.cpu_offload else states(planned, world, stages[name])
        for name, planned in models.items()
    }
    phases: dict[str, Bytes] = {}
    if config.algorithm.task == "rl":
        phases = {"start": {}, "rollout": {}} if config.strategy == "colocated" else {"rollout": {}}
    for name, planned in models.items():
        suffix = "" if name == POLICY else f"_{name}"
        phases[f"score{suffix}"] = {PARAMETERS: held[name].get(PARAMETERS, 0)}
        if planned.optimizer is not None:
            phases[f"update{suffix}"] = held[name]
    if config.algorithm.task == "rl":
        phases["push"] = {PARAMETERS: held[POLICY].get(PARAMETERS, 0)}
    if config.algorithm.task == "rl" and config.trainer.offload:
        return phases
    everything: Bytes = {PARAMETERS: -shared_bytes(models, stages)}
    for parts in held.values():
        everything = {kind: everything.get(kind, 0) + size for kind, size in parts.items()}
    freed = {kind: size for kind, size in everything.items() if kind != GRADIENTS}
    found = {
        phase: freed
        if backend_of(config).frees_gradients and not phase.startswith("update")
        else everything
        for phase in phases
    }
    if "start" in found:  # Adam has no states before its first step
        found["start"] = {kind: size for kind, size in found["start"].items() if kind != ADAM}
    return found


def load_of(config: RunConfig, parallel: ParallelConfig, world: int) -> Load:
    """Returns size and number of the micro-batches of an optimizer step if all sequences have the
    maximum length. `parallel`: layout of the trained model; `world`: number of trainer processes.
    """
    data = world // (parallel.tensor * parallel.pipeline * parallel.context)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    rows = max(1, rows_of(config) // config.algorithm.updates_per_epoch // data)
    share = math.ceil(rows / fewest_micro_batches(parallel.pipeline))
    fit = max(1, min(share, config.trainer.max_tokens_per_micro_batch // longest))
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    return Load(min(fit, rows) * longest, math.ceil(rows / fit / multiple) * multiple)


def rows_of(config: RunConfig) -> int:
    """Returns the number of rows (sequences) that a step trains on."""
    completions = config.rollout.train_samples_per_prompt or config.rollout.samples_per_prompt
    if config.algorithm.task != "rl":
        return config.trainer.prompts_per_step * config.given_rows
    return config.trainer.prompts_per_step * completions + config.given_completions


def cache_of(policy: PlannedModel, config: RunConfig, budget: Budget) -> Cache:
    """Returns the size of the KV cache of one of the run's engines; `budget`: memory of each of its
    devices.
    """
    ranks = config.rollout.tensor
    share = config.rollout.memory_fraction * budget.memory
    left = (
        share
        - engine.held_bytes(policy, config.rollout)
        - engine.working_bytes(policy.model, ranks, config.rollout.max_batch)
    )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return Cache(
        share, int(left), max(0.0, left) / (engine.cache_bytes(policy.model, ranks) * longest)
    )


def on_device(
    models: Mapping[str, PlannedModel],
    config: RunConfig,
    world: int,
    stages: Mapping[str, int],
    budget: Budget,
    push_buffers: int,
) -> dict[str, Bytes]:
    """Returns phase -> kind -> peak bytes on one process's CUDA device.

    `budget`: the device's memory; `push_buffers`: bytes of the buffers of a weight push; other
    arguments as of `resident`. A colocated engine takes all the memory that rollout.memory_fraction
    allows.
    """
    phases = {
        phase: dict(parts) for phase, parts in resident(models, config, world, stages).items()
    }
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    for name, planned in models.items():
        suffix = "" if name == POLICY else f"_{name}"
        stage, parallel = stages[name], planned.parallel
        load = load_of(config, parallel, world)
        patches = tower.patches_of(planned, config, load)
        rows = max(
            1, rows_of(config) * parallel.tensor * parallel.pipeline * parallel.context // world
        )
        # two numbers per token of this process's rows
        scored = 2 * 4 * rows * longest
        phases[f"score{suffix}"]["activations"] = activations.scoring(planned, stage, load) + scored
        if planned.optimizer is not None:
            trained = experience_bytes(config) * rows // config.algorithm.updates_per_epoch
            stored = activations.training(planned, stage, load)
            phases[f"update{suffix}"]["activations"] = stored + trained
        if planned.groups is not None:
            for phase, learns in ((f"score{suffix}", False), (f"update{suffix}", True)):
                if phase in phases:
                    phases[phase]["gathered"] = sharded.gathered(planned, world, learns=learns)
        if patches and not stage:
            phases[f"score{suffix}"]["tower"] = tower.scoring(planned, stage, patches)
            if planned.optimizer is not None:
                phases[f"update{suffix}"]["tower"] = tower.training(planned, stage, load, patches)
    if config.algorithm.task == "rl":
        phases["push"]["push_buffers"] = push_buffers
        if config.strategy == "colocated":
            policy, rollout = models[POLICY], config.rollout
            cache = cache_of(policy, config, budget)
            working = engine.working_bytes(policy.model, rollout.tensor, rollout.max_batch)
            whole = {
                "engine_weights": engine.held_bytes(policy, rollout),
                "engine_working": working,
                "kv_cache": max(0, cache.bytes),
            }
            phases["rollout"] |= whole
            phases["start"] |= whole
            phases["push"]["engine_weights"] = whole["engine_weights"]
    for parts in phases.values():
        parts["reserved"] = int(budget.reserved)
    return phases


def experience_bytes(config: RunConfig) -> int:
    """Returns the bytes that one row (sequence) of maximum length takes in an Experience and its
    Samples (rftmega/core/types.py).
    """
    algorithm = config.algorithm
    floats = (
        4 + (2 if algorithm.advantage.needs_critic else 0) + (1 if algorithm.kl.coef > 0 else 0)
    )
    return (config.rollout.max_prompt_tokens + config.rollout.max_response_tokens) * (
        8 + 1 + 4 * floats
    )


def _held(planned: PlannedModel, world: int, stage: int) -> tuple[int, int]:
    """Returns the number of trained weights that one process of pipeline stage `stage` holds, and
    the bytes per weight of a further copy of them, such as the reference model. `world`: number of
    trainer processes.
    """
    if planned.groups is None:
        return elements_of(alone(planned) if planned.adapted else planned, stage), planned.itemsize
    shards = sharded.shards_of(planned, world)
    return sharded.trained_of(planned.groups, shards), sharded.FLOAT


def on_host(
    models: Mapping[str, PlannedModel], config: RunConfig, world: int, stages: Mapping[str, int]
) -> Bytes:
    """Returns kind -> bytes that one process keeps in host memory: copies of weights, offloaded
    state, the buffer for saving checkpoints. Arguments as of `resident`. `data_plane.on_each_host`
    counts the memory that all processes of a host share.
    """
    policy, found = models[POLICY], Bytes()
    elements, itemsize = _held(policy, world, stages[POLICY])
    there = config.parallel.cpu_offload
    stay = [name for name, planned in models.items() if planned.parallel.cpu_offload]
    offloads = config.algorithm.task == "rl" and config.trainer.offload
    held = {name: states(planned, world, stages[name]) for name, planned in models.items()}
    # gradients are freed, not moved
    moved = {name: sum(parts.values()) - parts[GRADIENTS] for name, parts in held.items()}
    if config.algorithm.kl.coef > 0 and not config.model.lora.rank:
        found["reference"] = elements * itemsize
    if config.algorithm.ema_beta > 0:
        # plus a buffer for the weights of an optimizer step
        found["average"] = elements * (4 + itemsize)
    if found and not (offloads or there):
        found["policy"] = elements * itemsize  # stored here while the device holds others
    if stay:
        found["sharded"] = sum(sum(held[name].values()) for name in stay)
    # of the first of identical holders, which writes; kept for the next save
    if config.checkpoint.every:
        found["checkpoint"] = elements * 4 if config.algorithm.ema_beta > 0 else 0
        for name, planned in models.items():
            if (optimizer := planned.optimizer) is not None:
                # moments are float32 there
                wider = held[name][ADAM] * (MOMENTS["float32"] / MOMENTS[optimizer.states] - 1)
                frozen = frozen_bytes(planned, stages[name]) + sharded.frozen_bytes(planned, world)
                found["checkpoint"] += moved[name] - frozen + int(wider)
    if offloads and len(stay) < len(models):
        shared = shared_bytes(models, stages)
        found["offload"] = sum(moved[name] for name in models.keys() - stay) - shared
        if config.model.lora.base_on_host == "int8":
            own = [name for name, planned in models.items() if planned.adapted]
            for name in own[:1] if shared else own:
                found["offload"] -= _packed_away(models[name], stages[name])
    return found


def _packed_away(planned: PlannedModel, stage: int) -> int:
    """Returns the bytes that one process of pipeline stage `stage` saves by storing the linear
    layers of a frozen base model in int8 with scales.
    """
    linear = [rule for rule in planned.rules if all(map(is_linear, rule.hf_names(0, 0)))]
    elements = elements_of(replace(planned, rules=linear), stage)
    return int(elements * (planned.itemsize - 1 - 4 / COLUMNS_OF_A_SCALE))
