"""Recommends a backend for a model and a number of devices: the best layout of each is looked for."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

from rftmega.config import ParallelConfig, RunConfig
from rftmega.config.tree import value_of
from rftmega.errors import CheckpointError, ConfigError
from rftmega.planning.fit import (
    Machine,
    Misfit,
    changed,
    laid_out,
    misfits,
    powers,
    push_bound,
    refused,
    stage_options,
    total_seconds,
)
from rftmega.planning.models import POLICY, PlannedModel, models_of

Backend = Literal["megatron", "fsdp"]
BACKENDS: tuple[Backend, ...] = ("megatron", "fsdp")
CLOSE = 1.1  # times as long: then the simpler is taken
LONGER = (2, 4, 8, 16)  # context-parallel processes, where no layout fits with fewer


@dataclass(frozen=True)
class Best:
    """Best is the quickest layout of a backend that fits, or why there is none."""

    changes: Mapping[str, Any] | None  # options that give it
    seconds: float  # of a step at least, the push aside
    why: str = ""


@dataclass(frozen=True)
class Recommendation:
    """Recommendation names a backend and says why."""

    backend: str
    why: str
    best: Mapping[Backend, Best]


def recommended(config: RunConfig, machine: Machine) -> Recommendation:
    """Compares the best layouts of both backends for a run on `machine`."""
    best = {backend: best_of(on_backend(config, backend), machine) for backend in BACKENDS}
    ours, theirs = (best[backend] for backend in BACKENDS)
    if theirs.changes is None and ours.changes is None:
        return Recommendation("", "Neither backend has a layout that fits.", best)
    if theirs.changes is None:
        return Recommendation("megatron", f"under fsdp no layout fits: {theirs.why}", best)
    if ours.changes is None:
        return Recommendation("fsdp", f"Megatron has no layout: {ours.why}", best)
    ratio = theirs.seconds / ours.seconds
    if ratio <= CLOSE:
        why = f"its step takes {ratio:.2f} times as long as Megatron's best layout, and there is less to choose"
        return Recommendation("fsdp", why, best)
    why = f"a step under fsdp takes {ratio:.2f} times as long as in its best layout"
    return Recommendation("megatron", why, best)


def on_backend(config: RunConfig, backend: Backend) -> RunConfig:
    """Returns a copy of a config on a backend; on another than its own, without a layout."""
    found = changed(config, {})
    if config.backend == backend:
        return found
    found.backend = backend
    for section in (found, found.critic):
        section.parallel, section.optimizer = ParallelConfig(), copy.copy(section.optimizer)
        section.optimizer.distributed = backend == "megatron"
        for each in fields(section.optimizer):
            if each.name.startswith("overlap_"):
                setattr(section.optimizer, each.name, each.default)
    found.critic.parallel = found.parallel
    return found


def best_of(config: RunConfig, machine: Machine) -> Best:
    """Returns the quickest layout of `config.backend` that fits."""
    try:
        models = models_of(config)
    except (CheckpointError, ConfigError) as error:
        return Best(None, 0.0, str(error))
    if config.backend == "fsdp":
        return _quickest(models, config, machine, _of_fsdp(machine, config))
    # What context parallelism exchanges is not counted, so it is no way to be quicker.
    few = sorted({1, config.parallel.context})
    found = _quickest(models, config, machine, _of_megatron(models, config, machine, few))
    if found.changes is None:
        more = _of_megatron(models, config, machine, LONGER)
        longer = _quickest(models, config, machine, more)
        found = found if longer.changes is None else longer
    return found


def _quickest(
    models: Mapping[str, PlannedModel],
    config: RunConfig,
    machine: Machine,
    layouts: Iterable[dict[str, Any]],
) -> Best:
    found: Best | None = None
    closest: Misfit | None = None
    refusal = ""
    for changes in layouts:
        candidate = changed(config, changes)
        if problems := refused(models, candidate, machine):
            refusal = refusal or problems[0]
            continue
        theirs = laid_out(models, candidate)
        reasons = misfits(theirs, candidate, machine, push_bound(theirs[POLICY], candidate))
        if reasons:
            worst = max(reasons, key=lambda reason: reason.over)
            closest = worst if closest is None or worst.over < closest.over else closest
            continue
        seconds = total_seconds(theirs, candidate, machine)
        if found is None or seconds < found.seconds:
            found = Best(_unlike_defaults(changes), seconds)
    return found or Best(None, 0.0, closest.reason if closest else refusal)


def _unlike_defaults(changes: Mapping[str, Any]) -> dict[str, Any]:
    plain = RunConfig()
    return {name: value for name, value in changes.items() if value != value_of(plain, name)}


def _of_fsdp(machine: Machine, config: RunConfig) -> Iterator[dict[str, Any]]:
    world = machine.trainers(config)
    shared = powers(min(machine.speeds.node, world))
    for recompute, tensor in product(("none", "full"), shared):
        computed = {"parallel.recompute": recompute, "parallel.tensor": tensor}
        sharding = {"parallel.reshard_after_forward": True, "parallel.cpu_offload": False}
        for replicas in powers(world // tensor):
            yield {"parallel.replicas": replicas} | sharding | computed
            gathered_once = {"parallel.reshard_after_forward": False}
            yield {"parallel.replicas": replicas} | sharding | gathered_once | computed
        yield {"parallel.replicas": 1} | sharding | {"parallel.cpu_offload": True} | computed


def _of_megatron(
    models: Mapping[str, PlannedModel],
    config: RunConfig,
    machine: Machine,
    contexts: Sequence[int],
) -> Iterator[dict[str, Any]]:
    model, world = models[POLICY].model, machine.trainers(config)
    experts = powers(world) if model.experts else [1]
    combined = product(
        ("none", "full"), powers(machine.speeds.node), powers(model.layers), contexts, experts
    )
    for recompute, tensor, pipeline, context, expert in combined:
        if world % (tensor * pipeline * context) == 0:
            yield {
                "parallel.tensor": tensor,
                "parallel.sequence": tensor > 1,
                "parallel.pipeline": pipeline,
                "parallel.virtual_pipeline": 1,
                **stage_options(model.layers, pipeline),
                "parallel.context": context,
                "parallel.expert": expert,
                "parallel.expert_tensor": 1,
                "parallel.recompute": recompute,
            }
