"""Recommends a backend for a model and a number of devices, by comparing the quickest layouts of
both backends.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rftmega.config import ParallelConfig, RunConfig
from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.run.planning.fit import Machine, changed
from rftmega.run.planning.models import models_of
from rftmega.run.planning.search import found_layout

Backend = Literal["megatron", "fsdp"]
BACKENDS: tuple[Backend, ...] = ("megatron", "fsdp")
CLOSE = 1.1  # ratio of step times up to which the simpler backend is chosen


@dataclass(frozen=True)
class Best:
    """Best is the quickest layout of a backend that fits into the memory of the devices, or the
    reason (`why`) why none fits.
    """

    config: RunConfig | None
    seconds: float  # lower bound of a step without the push
    why: str = ""

    def changes(self, given: RunConfig) -> dict[str, Any] | None:
        """Returns the options in which this layout differs from the config `given`, as dotted name
        -> value; None if no layout fits.
        """
        return None if self.config is None else difference(given, self.config)


@dataclass(frozen=True)
class Recommendation:
    """Recommendation names a backend ("" if no layout fits) and the reason, with the best layout of
    each backend.
    """

    backend: str
    why: str
    best: Mapping[Backend, Best]


def recommended(config: RunConfig, machine: Machine) -> Recommendation:
    """Recommends a backend for a run on `machine`: FSDP2, unless none of its layouts fits or its
    step takes more than CLOSE times as long as Megatron's.
    """
    best = {backend: best_of(on_backend(config, backend), machine) for backend in BACKENDS}
    ours, theirs = (best[backend] for backend in BACKENDS)
    if theirs.config is None and ours.config is None:
        why = f"neither backend has a layout that fits. Megatron: {ours.why}; FSDP2: {theirs.why}"
        return Recommendation("", why, best)
    if theirs.config is None:
        return Recommendation("megatron", f"under fsdp no layout fits: {theirs.why}", best)
    if ours.config is None:
        return Recommendation("fsdp", f"Megatron has no layout: {ours.why}", best)
    ratio = theirs.seconds / ours.seconds
    if ratio <= CLOSE:
        why = f"its step takes {ratio:.2f} times as long as Megatron's best layout, and there is less to choose"
        return Recommendation("fsdp", why, best)
    why = f"a step under fsdp takes {ratio:.2f} times as long as in its best layout"
    return Recommendation("megatron", why, best)


def on_backend(config: RunConfig, backend: Backend) -> RunConfig:
    """Returns a copy of a config with the backend `backend`. If the backend changes, the layouts
    and the optimizers' distribution and overlap options get their defaults.
    """
    found = changed(config, {})
    if config.backend == backend:
        return found
    found.backend = backend
    for section in (found, found.critic):
        section.parallel, section.optimizer = ParallelConfig(), copy.copy(section.optimizer)
        section.optimizer.distributed = True
        for each in fields(section.optimizer):
            if each.name.startswith("overlap_"):
                setattr(section.optimizer, each.name, each.default)
    found.critic.parallel = found.parallel
    return found


def best_of(config: RunConfig, machine: Machine) -> Best:
    """Returns the quickest layout of `config.backend` that fits into the memory of `machine`, or
    the reason why none fits.
    """
    try:
        models = models_of(config)
    except (CheckpointError, ConfigError) as error:
        return Best(None, 0.0, str(error))
    found = found_layout(models, config, machine, "quickest")
    if found.proposal is None:
        return Best(None, 0.0, found.why)
    return Best(found.proposal.config, found.proposal.seconds)


def difference(given: RunConfig, chosen: RunConfig) -> dict[str, Any]:
    """Returns dotted name -> value in `chosen` for the options of backend, layout, optimizer,
    rollout and trainer in which the configs `given` and `chosen` differ.
    """
    found = {} if given.backend == chosen.backend else {"backend": chosen.backend}
    for section in ("parallel", "optimizer", "rollout", "trainer"):
        before, now = getattr(given, section), getattr(chosen, section)
        for each in fields(now):
            value = getattr(now, each.name)
            if value != getattr(before, each.name):
                found[f"{section}.{each.name}"] = value
    return found
