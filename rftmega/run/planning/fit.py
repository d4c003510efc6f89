"""Checks whether a run fits into the memory of its devices and hosts (`search` finds layouts that
fit).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rftmega.config import ParallelConfig, RunConfig
from rftmega.config.options.teachers import names_of
from rftmega.config.tree import value_of
from rftmega.config.validation import violations
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import heads_violations, layout_violations
from rftmega.run.planning import engine
from rftmega.run.planning.data_plane import on_each_host
from rftmega.run.planning.memory import Budget, Bytes, cache_of, on_device, on_host
from rftmega.run.planning.models import POLICY, PlannedModel
from rftmega.run.planning.push_buffers import bound_of
from rftmega.run.planning.times import Speeds
from rftmega.runtime.parallel.layout import nodes_of_engine

GB = 1e9
CHANGING = ("parallel", "optimizer", "rollout", "trainer", "critic")  # sections


@dataclass(frozen=True)
class Machine:
    """Machine is the hardware of a run: `devices` is the number of devices, each with the memory
    `budget` and the rates `speeds`; `host` is the host memory of a node in bytes (0: ignored).
    """

    devices: int
    budget: Budget
    speeds: Speeds
    host: float = 0.0

    def trainers(self, config: RunConfig) -> int:
        """Returns the number of the trainer's devices: all except the devices of separate
        servers.
        """
        if config.strategy != "separate":
            return self.devices
        return self.devices - config.rollout.servers * config.rollout.tensor


@dataclass(frozen=True)
class Misfit:
    """Misfit is a reason why a run does not fit into memory.

    `over`: required memory over available memory; `phase`: the phase that needs too much, such as
    "update", or "host" for host memory.
    """

    reason: str
    over: float
    phase: str


def stages_of(models: Mapping[str, PlannedModel], world: int) -> list[dict[str, int]]:
    """Returns one dictionary for each pipeline stage of the model with the most stages: model name
    -> the stage of this model that is on the same processes. `world`: number of trainer processes.
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
    """Returns the reasons why a run does not fit into the memory of devices and hosts; [] if it
    fits.

    `models`: the run's models by name; `push_buffers`: bytes of the buffers of a weight push on one
    process.
    """
    found, world, budget = [], machine.trainers(config), machine.budget
    if config.algorithm.task == "rl" and (misfit := engine_misfit(models[POLICY], config, budget)):
        found.append(misfit)
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
    hosts += sum(on_each_host(config, models[POLICY].model.experts, models).values())
    if machine.host and hosts > machine.host:
        found.append(
            Misfit(
                f"a host needs {hosts / GB:.0f} GB of its {machine.host / GB:.0f}",
                hosts / machine.host,
                "host",
            )
        )
    return found + list(worst.values())


def engine_misfit(policy: PlannedModel, config: RunConfig, budget: Budget) -> Misfit | None:
    """Returns a Misfit if an engine has no memory for the KV cache of one completion, else None."""
    cache = cache_of(policy, config, budget)
    if cache.sequences >= 1:
        return None
    needed = engine.held_bytes(policy, config.rollout)
    needed += engine.working_bytes(policy.model, config.rollout.tensor, config.rollout.max_batch)
    return Misfit(
        f"rollout: the engine's weights and work take {needed / GB:.1f} GB; rollout.memory_fraction="
        f"{config.rollout.memory_fraction:g} gives {cache.budget / GB:.1f}, no room for a completion's cache",
        1 + needed / budget.memory,
        "rollout",
    )


def _said(phase: str, stage: int, parts: Bytes, budget: Budget) -> str:
    largest = sorted(parts, key=lambda kind: -parts[kind])[:2]
    named = ", ".join(f"{kind.replace('_', ' ')} {parts[kind] / GB:.1f}" for kind in largest)
    return f"{phase} on stage {stage} needs {sum(parts.values()) / GB:.1f} GB of {budget.memory / GB:g} ({named})"


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Returns a copy of the config with `changes` (dotted option name -> value).

    A critic with the same layout or optimizer as the policy gets the changed one, too.
    """
    # copy.copy would read the whole config again: RunConfig is restored from its options
    sections = {name: replace(getattr(config, name)) for name in CHANGING}
    found = replace(config, **sections)
    for name, value in changes.items():
        *path, leaf = name.split(".")
        setattr(value_of(found, ".".join(path)), leaf, value)
    for section in ("parallel", "optimizer"):
        if getattr(config.critic, section) == getattr(config, section):
            setattr(found.critic, section, getattr(found, section))
    return found


def laid_out(models: Mapping[str, PlannedModel], config: RunConfig) -> dict[str, PlannedModel]:
    """Returns copies of the models with the layouts and optimizers of `config`, by name; teachers
    keep their own layouts.
    """
    own = {
        POLICY: (config.parallel, config.optimizer),
        "critic": (config.critic.parallel, config.critic.optimizer),
        **dict.fromkeys(config.reward.scoring_models(), (config.parallel, None)),
    }
    return {
        name: planned.with_layout(*own[name]) if name in own else planned
        for name, planned in models.items()
    }


def refused(models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine) -> list[str]:
    """Returns the reasons, besides memory, why the config can't run on `machine`; data files are
    not checked. `models`: the run's models by name.
    """
    found = violations(config, machine.trainers(config), data=False)
    teachers = names_of(config.algorithm.teachers)
    for name, planned in models.items():
        parallel: ParallelConfig = config.critic.parallel if name == "critic" else config.parallel
        if name in teachers:
            parallel = planned.parallel
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
    """Returns an approximate upper bound in bytes of the buffers that a weight push takes on one
    process of a colocated run; 0 for other runs.
    """
    if config.algorithm.task != "rl" or config.strategy == "separate":
        return 0
    return bound_of(policy, config.rollout.tensor, config.trainer.push_bucket_mib * 2**20)
