"""Checks of the parallel layout of policy, critic and engines."""

import math
from collections.abc import Iterable
from dataclasses import fields

from rftmega.config.capabilities import engine_of
from rftmega.config.schema import (
    FaultsConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
)
from rftmega.config.tree import value_of


def layout(parallel: ParallelConfig, world_size: int) -> list[str]:
    """Returns the problems of a parallel layout: sizes that do not divide `world_size`, and options
    that need several pipeline stages or tensor-parallel processes.
    """
    found = []
    experts = (
        [("expert_tensor", "expert", "pipeline")]
        if parallel.expert * parallel.expert_tensor > 1
        else []
    )
    for options in [("tensor", "context", "pipeline"), *experts]:
        sizes = {option: size for option in options if (size := getattr(parallel, option)) > 1}
        together = math.prod(sizes.values())
        if world_size % together:
            nearest = max(round(world_size / together), 1) * together
            found.append(
                f"{' x '.join(f'parallel.{option}' for option in sizes)} = {_product(sizes.values())} does not "
                f"divide the {world_size} launched processes. Launch {nearest} (--processes or torchrun), or lower one of them."
            )
    if parallel.sequence and parallel.tensor == 1:
        found.append(
            "parallel.sequence needs parallel.tensor > 1: it splits the sequence between the tensor-parallel processes."
        )
    if parallel.pipeline == 1:
        for option, off in (
            ("virtual_pipeline", 1),
            ("first_stage_layers", 0),
            ("last_stage_layers", 0),
        ):
            if (value := getattr(parallel, option)) != off:
                found.append(
                    f"parallel.{option}={value} needs parallel.pipeline > 1: there is one stage. Set it to {off}."
                )
    return found


def _product(factors: Iterable[int]) -> str:
    """Returns the factors and their product as text: "2 x 3 = 6"; "6" for a single factor."""
    factors = list(factors)
    return " x ".join(map(str, factors)) + (f" = {math.prod(factors)}" if len(factors) > 1 else "")


def overlap(optimizer: OptimizerConfig) -> list[str]:
    """Returns a problem if optimizer.overlap_param_gather is set without the options that it
    requires.
    """
    missing = [
        name for name in ("distributed", "overlap_grad_reduce") if not getattr(optimizer, name)
    ]
    if optimizer.overlap_param_gather and missing:
        needed = " and ".join(f"optimizer.{name}=true" for name in missing)
        return [
            f"optimizer.overlap_param_gather=true also needs {needed}: only sharded parameters are gathered."
        ]
    return []


def critic(config: RunConfig, world_size: int) -> list[str]:
    """Returns the problems of the critic's layout and optimizer.

    Without a critic, returns a problem for each critic option that is set, because it has no
    effect.
    """
    critic = config.critic
    if config.algorithm.advantage.needs_critic:
        found = [*layout(critic.parallel, world_size), *overlap(critic.optimizer)]
        already = [*layout(config.parallel, world_size), *overlap(config.optimizer)]
        found = [f"For the critic: {reason}" for reason in found if reason not in already]
        if (frozen := config.critic.warmup_steps) >= config.trainer.steps:
            found.append(
                f"critic.warmup_steps={frozen} leaves the policy nothing of the {config.trainer.steps} steps "
                "(trainer.steps). Lower it."
            )
        return found
    unread = [
        f"critic.{section}.{f.name}"
        for section in ("parallel", "optimizer")
        for f in fields(getattr(critic, section))
        if getattr(getattr(critic, section), f.name)
        not in (f.default, getattr(getattr(config, section), f.name))
    ]
    own = [
        f"critic.{name}"
        for name in ("path", "warmup_steps", "value_clip", "value_huber")
        if getattr(critic, name)
    ]
    return [
        f"{name}={value_of(config, name)} needs algorithm.advantage.type=gae, not {config.algorithm.advantage.type}: there is no "
        "critic."
        for name in (*unread, *own)
    ]


def engine(config: RunConfig, world_size: int) -> list[str]:
    """Returns the problems of the rollout engine: options that it does not support, and a number of
    engines that does not fit `world_size`.
    """
    found = []
    if "" in config.rollout.stop:
        found.append(
            "rollout.stop has an empty string, which is in every completion. Leave it out."
        )
    chosen = engine_of(config.rollout)
    if not chosen.split:
        found += [
            f"rollout.{option}={value} needs rollout.engine=vllm: nothing else reads it."
            for option in ("memory_fraction", "cpu_cache_gib")
            if (value := getattr(config.rollout, option)) != getattr(RolloutConfig, option)
        ]
    if config.strategy == "separate":
        if not chosen.served:
            found.append(
                f"strategy=separate takes servers of vLLM and SGLang, not rollout.engine={config.rollout.engine}. Set it to vllm."
            )
        return found
    if not chosen.colocated:
        return [
            *found,
            "rollout.engine=sglang is for servers that others start. Set strategy=separate and rollout.addresses, or take vllm.",
        ]
    if config.rollout.deadline_seconds != RolloutConfig.deadline_seconds:
        found.append(
            f"rollout.deadline_seconds={config.rollout.deadline_seconds:g} needs strategy=separate: what hangs in the trainer's "
            "own processes is ended by faults.watchdog_seconds."
        )
    if config.rollout.servers > 1:
        found.append(
            f"rollout.servers={config.rollout.servers} needs strategy=separate: colocated engines are no servers."
        )
    if world_size % config.rollout.tensor:
        found.append(
            f"rollout.tensor={config.rollout.tensor} does not divide the {world_size} launched processes, so the last engine "
            "would be incomplete. Lower it."
        )
    if not chosen.side_by_side and config.rollout.max_batch != RolloutConfig.max_batch:
        found.append(
            f"rollout.max_batch={config.rollout.max_batch} needs rollout.engine=vllm or scripted: transformers answers one "
            "after the other."
        )
    if not chosen.has_model:
        found += [
            f"rollout.{option}={value} needs rollout.engine=vllm or transformers: the scripted one has no model to differ from."
            for option in ("max_logprob_gap", "mean_logprob_gap")
            if (value := getattr(config.rollout, option))
        ]
        if config.rollout.stop:
            found.append(
                f"rollout.stop={config.rollout.stop} needs rollout.engine=vllm or transformers: the scripted one writes no text."
            )
    if not chosen.split and config.faults.engine_restarts != FaultsConfig.engine_restarts:
        found.append(
            f"faults.engine_restarts={config.faults.engine_restarts} needs rollout.engine=vllm: no other is "
            "started again without the trainer's process, which faults.max_restarts is about."
        )
    if not chosen.split and config.rollout.tensor > 1:
        found.append(
            f"rollout.tensor={config.rollout.tensor}: only the vllm engine is split over processes. Set it to 1."
        )
    return found
