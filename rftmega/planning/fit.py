"""Checks whether a run fits into its devices and hosts; if it does not, finds the change of fewest
options that makes it fit.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from rftmega.config import ParallelConfig, RunConfig
from rftmega.config.tree import value_of
from rftmega.errors import CheckpointError
from rftmega.model_providers.description import heads_violations, layout_violations
from rftmega.parallel.layout import nodes_of_engine
from rftmega.planning import engine
from rftmega.planning.data_plane import on_each_host
from rftmega.planning.memory import Budget, Bytes, cache_of, on_device, on_host
from rftmega.planning.models import POLICY, PlannedModel
from rftmega.planning.push_buffers import bound_of
from rftmega.planning.times import Speeds, seconds
from rftmega.planning.tower import patches_of_prompt
from rftmega.validation import violations

GB = 1e9
MOST = 2_000  # layouts that are looked at


@dataclass(frozen=True)
class Machine:
    """Machine is the hardware that a run is to fit: `devices` of `budget` each; bytes of a node's
    host memory (0: ignored).
    """

    devices: int
    budget: Budget
    speeds: Speeds
    host: float = 0.0

    def trainers(self, config: RunConfig) -> int:
        """Devices that the trainer has: all but those of separate servers."""
        if config.strategy != "separate":
            return self.devices
        return self.devices - config.rollout.servers * config.rollout.tensor


@dataclass(frozen=True)
class Misfit:
    """Misfit tells why a run does not fit.

    `over`: by how many times; `phase`: in which, or "host".
    """

    reason: str
    over: float
    phase: str


@dataclass(frozen=True)
class Proposal:
    """Options to change, and what comes of it."""

    changes: Mapping[str, Any]
    seconds: float
    config: RunConfig


def stages_of(models: Mapping[str, PlannedModel], world: int) -> list[dict[str, int]]:
    """Returns, for the first process of each stage (of the policy, or of the model that has most),
    its stage in every model.
    """
    most = max(planned.parallel.pipeline for planned in models.values())
    ranks = [world // most * number for number in range(most)]
    return [
        {name: rank // (world // planned.parallel.pipeline) for name, planned in models.items()}
        for rank in ranks
    ]


def misfits(
    models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine, push_buffers: int
) -> list[Misfit]:
    """Lists why the models do not fit; empty where everything fits."""
    found, world, budget = [], machine.trainers(config), machine.budget
    if config.algorithm.task == "rl":
        found += _engine(models[POLICY], config, budget)
    worst: dict[str, Misfit] = {}
    hosts = 0.0
    stages = stages_of(models, world)
    for number, place in enumerate(stages):
        for phase, parts in on_device(models, config, world, place, budget, push_buffers).items():
            over = sum(parts.values()) / budget.memory
            if over > 1 and (phase not in worst or over > worst[phase].over):
                worst[phase] = Misfit(_said(phase, number, parts, budget), over, phase)
        held = sum(on_host(models, config, world, place).values())
        hosts = max(hosts, held * min(world, machine.speeds.node))
    hosts += sum(on_each_host(config, models[POLICY].model.experts).values())
    if machine.host and hosts > machine.host:
        found.append(
            Misfit(
                f"a host needs {hosts / GB:.0f} GB of its {machine.host / GB:.0f}",
                hosts / machine.host,
                "host",
            )
        )
    return found + list(worst.values())


def _engine(policy: PlannedModel, config: RunConfig, budget: Budget) -> list[Misfit]:
    cache = cache_of(policy, config, budget)
    if cache.sequences >= 1:
        return []
    needed = engine.held_bytes(policy, config.rollout)
    needed += engine.working_bytes(policy.model, config.rollout.tensor, config.rollout.max_batch)
    return [
        Misfit(
            f"rollout: the engine's weights and work take {needed / GB:.1f} GB; rollout.memory_fraction="
            f"{config.rollout.memory_fraction:g} gives {cache.budget / GB:.1f}, no answer's cache",
            1 + needed / budget.memory,
            "rollout",
        )
    ]


def _said(phase: str, stage: int, parts: Bytes, budget: Budget) -> str:
    largest = sorted(parts, key=lambda kind: -parts[kind])[:2]
    named = ", ".join(f"{kind.replace('_', ' ')} {parts[kind] / GB:.1f}" for kind in largest)
    return f"{phase} on stage {stage} needs {sum(parts.values()) / GB:.1f} GB of {budget.memory / GB:g} ({named})"


def nearest(
    models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine
) -> tuple[Proposal | None, list[tuple[Mapping[str, Any], Misfit]]]:
    """Returns (the quickest of those that fit with fewest changes; every other that was looked at,
    with why it does not fit).

    Only what matters where `config` does not fit is changed.
    """
    rejected: list[tuple[Mapping[str, Any], Misfit]] = []
    now = misfits(models, config, machine, push_bound(models[POLICY], config))
    options = choices(models[POLICY], config, machine, {reason.phase for reason in now})
    seen = 0
    for number in range(1, len(options) + 1):
        fitting: list[Proposal] = []
        for changes in _combined(options, number):
            changes = {
                name: value for name, value in changes.items() if value != value_of(config, name)
            }
            candidate = changed(config, changes)
            if refused(models, candidate, machine):
                continue
            seen += 1
            if seen > MOST:
                return min(fitting, key=lambda one: one.seconds, default=None), rejected
            theirs = laid_out(models, candidate)
            reasons = misfits(theirs, candidate, machine, push_bound(theirs[POLICY], candidate))
            if reasons:
                rejected.append((changes, max(reasons, key=lambda reason: reason.over)))
            else:
                fitting.append(
                    Proposal(changes, total_seconds(theirs, candidate, machine), candidate)
                )
        if fitting:
            return min(fitting, key=lambda one: one.seconds), rejected
    return None, rejected


def choices(
    policy: PlannedModel, config: RunConfig, machine: Machine, phases: Collection[str]
) -> list[list[dict[str, Any]]]:
    """Lists, for each option that may change, its choices: other values than it has.

    Only of what tells in one of `phases`.
    """
    found = []
    if set(phases) - {"rollout"} or not config.trainer.offload:
        if config.backend == "fsdp":
            found += _of_shards(config, machine)
        else:
            found += _of_the_trainer(policy, config, machine)
    if config.algorithm.task == "rl":
        found.append([{"trainer.offload": True}] if not config.trainer.offload else [])
        if {"start", "rollout", "push"} & set(phases):
            ranks = [2**n for n in range(6)]
            found.append([{"rollout.tensor": r} for r in ranks if r != config.rollout.tensor])
            fractions = (0.6, 0.7, 0.8, 0.4, 0.3)
            found.append(
                [
                    {"rollout.memory_fraction": f}
                    for f in fractions
                    if f != config.rollout.memory_fraction
                ]
            )
    return [values for values in found if values]


def _of_the_trainer(
    policy: PlannedModel, config: RunConfig, machine: Machine
) -> list[list[dict[str, Any]]]:
    world, parallel, model = machine.trainers(config), config.parallel, policy.model
    twos = powers(world)
    found: list[list[dict[str, Any]]] = [
        [
            {"parallel.tensor": t, "parallel.sequence": t > 1}
            for t in twos
            if t != parallel.tensor and t <= machine.speeds.node
        ],
        [
            {
                "parallel.pipeline": p,
                "parallel.virtual_pipeline": 1,
                **stage_options(model.layers, p),
            }
            for p in twos
            if p != parallel.pipeline and p <= model.layers
        ],
        [{"parallel.context": c} for c in twos if c != parallel.context and c <= 16],
        [{"parallel.virtual_pipeline": v} for v in (1, 2, 4) if v != parallel.virtual_pipeline],
        [{"parallel.recompute": "full"}] if parallel.recompute != "full" else [],
        [{"optimizer.distributed": True}] if not config.optimizer.distributed else [],
    ]
    if model.experts:
        found.append([{"parallel.expert": e} for e in twos if e != parallel.expert])
    found.append(_fewer_tokens(config))
    patches, bound = patches_of_prompt(model, config), config.trainer.max_patches_per_micro_batch
    if patches and (not bound or patches < bound):
        found.append([{"trainer.max_patches_per_micro_batch": patches}])
    return found


def _of_shards(config: RunConfig, machine: Machine) -> list[list[dict[str, Any]]]:
    """Lists the choices of a trainer on FSDP2."""
    world, parallel = machine.trainers(config), config.parallel
    replicas = [n for n in powers(world) if world % n == 0 and n != parallel.replicas]
    shared = powers(min(machine.speeds.node, world))
    found: list[list[dict[str, Any]]] = [
        [{"parallel.replicas": n} for n in replicas],
        [{"parallel.tensor": t} for t in shared if t != parallel.tensor],
        [{"parallel.recompute": "full"}] if parallel.recompute != "full" else [],
        [{"parallel.reshard_after_forward": True}] if not parallel.reshard_after_forward else [],
        [{"parallel.cpu_offload": True}] if not parallel.cpu_offload else [],
    ]
    return [*found, _fewer_tokens(config)]


def powers(most: int) -> list[int]:
    """Returns the powers of 2 up to `most`."""
    return [2**n for n in range(int(math.log2(max(most, 1))) + 1)]


def _fewer_tokens(config: RunConfig) -> list[dict[str, Any]]:
    """Returns micro-batches of one row, where they may be."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if config.algorithm.task == "reward_model" or config.reward.model:
        return []
    shorter = longest < config.trainer.max_tokens_per_micro_batch
    return [{"trainer.max_tokens_per_micro_batch": longest}] if shorter else []


def stage_options(layers: int, number: int) -> dict[str, int]:
    """Returns the options for stages that can't be equal: the last one, which has the output head
    as well, holds fewer layers.
    """
    last = layers - (number - 1) * math.ceil(layers / number)
    while last < 1 or (number > 1 and (layers - last) % (number - 1)):
        last += 1
    return {
        "parallel.first_stage_layers": 0,
        "parallel.last_stage_layers": 0 if layers % number == 0 else last,
    }


def _combined(options: list[list[dict[str, Any]]], number: int) -> Iterator[dict[str, Any]]:
    for group in combinations(options, number):
        for parts in product(*group):
            yield {name: value for part in parts for name, value in part.items()}


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Returns a copy with other values.

    Where the critic has the policy's layout or optimizer, it goes along.
    """
    found = copy.copy(config)
    for section in ("parallel", "optimizer", "rollout", "trainer", "critic"):
        setattr(found, section, copy.copy(getattr(config, section)))
    for name, value in changes.items():
        *path, leaf = name.split(".")
        setattr(value_of(found, ".".join(path)), leaf, value)
    for section in ("parallel", "optimizer"):
        if getattr(config.critic, section) == getattr(config, section):
            setattr(found.critic, section, getattr(found, section))
    return found


def laid_out(models: Mapping[str, PlannedModel], config: RunConfig) -> dict[str, PlannedModel]:
    """Returns the models in the layouts of `config`."""
    own = {
        "critic": (config.critic.parallel, config.critic.optimizer),
        "reward_model": (config.parallel, None),
    }
    return {
        name: planned.with_layout(*own.get(name, (config.parallel, config.optimizer)))
        for name, planned in models.items()
    }


def refused(models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine) -> list[str]:
    """Lists what the config's own checks refuse, files aside."""
    found = violations(config, machine.trainers(config), data=False)
    for name, planned in models.items():
        parallel: ParallelConfig = config.critic.parallel if name == "critic" else config.parallel
        if planned.groups is None:
            found += layout_violations(planned.model, parallel)
            continue
        try:
            planned.groups_of(parallel.tensor)
        except CheckpointError as error:
            found.append(str(error))
    if config.algorithm.task == "rl":
        found += heads_violations(models[POLICY].model, config.rollout.tensor, "rollout.tensor")
        over = nodes_of_engine(config.rollout.tensor, machine.speeds.node)
        if not over or (over > 1 and config.strategy == "separate"):
            found.append(
                f"rollout.tensor={config.rollout.tensor} does not fit a node's {machine.speeds.node} devices: an engine lies "
                "within a node, or, in the trainer's processes, has whole nodes."
            )
    return found


def push_bound(policy: PlannedModel, config: RunConfig) -> int:
    """Returns the bytes of a run's push buffers that are hardly exceeded."""
    if config.algorithm.task != "rl" or config.strategy == "separate":
        return 0
    return bound_of(policy, config.rollout.tensor, config.trainer.push_bucket_mib * 2**20)


def total_seconds(models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine) -> float:
    """Returns the seconds of a step, the push aside."""
    cache = (
        cache_of(models[POLICY], config, machine.budget) if config.algorithm.task == "rl" else None
    )
    found = seconds(models, config, machine.trainers(config), cache, None, machine.speeds)
    return sum(sum(parts.values()) for parts in found.values())
