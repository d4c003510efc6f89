"""Searches the layouts of a run on a machine for the quickest that fits, or for the one that fits
with the fewest changes to the config.

Trainer layouts and engine sizes are listed separately. The time and a lower bound of the memory are
cheap to compute for each; then the complete memory of pairs is computed in order of preference
until a pair fits.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from rftmega.config import RunConfig
from rftmega.config.capabilities import backend_of
from rftmega.config.tree import value_of
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import heads_violations, stage_layers
from rftmega.run.planning.activations import training
from rftmega.run.planning.fit import (
    Machine,
    Misfit,
    changed,
    engine_misfit,
    laid_out,
    misfits,
    push_bound,
    refused,
)
from rftmega.run.planning.memory import cache_of, load_of
from rftmega.run.planning.models import GRADIENTS, POLICY, PlannedModel
from rftmega.run.planning.states import states
from rftmega.run.planning.times import generated, seconds
from rftmega.run.planning.tower import patches_of_prompt
from rftmega.runtime.parallel.layout import nodes_of_engine

GB = 1e9
LONGEST_ENGINE = 64  # processes
FRACTIONS = (0.6, 0.7, 0.8, 0.85, 0.4, 0.3)  # of rollout.memory_fraction, besides the config's
LONGER = (2, 4, 8, 16)  # context-parallel sizes, tried if no layout fits without
UNEVEN = 1.25  # maximum of the largest stage's layers over the mean
MOST = 100  # layouts whose memory is computed completely
ALIKE = 1.1  # ratio of step times within a roofline's error
ACTIVATIONS = "activations"
TRAINER = ("update", "score")  # phases that involve no engine
Changes = Mapping[str, Any]
Axis = list[dict[str, Any]]  # alternative values of one setting; {}: the config's own
Order = Literal["quickest", "nearest"]


@dataclass(frozen=True)
class Proposal:
    """Proposal is a set of option changes that make a run fit, and the resulting seconds of a step,
    without the push.
    """

    changes: Changes
    seconds: float
    config: RunConfig


@dataclass(frozen=True)
class Alternative:
    """Alternative is one layout of the trainer, or one size of the engine.

    `changes`: its options; `moved`: number of settings in which it differs from the config;
    `seconds`: lower bound of the time that its part of a step takes; `stays`: bytes of a device
    that it occupies during a rollout; `simple`: sort key, smaller is simpler.
    """

    changes: Changes
    moved: int
    seconds: float
    stays: float = 0.0
    simple: tuple[int, ...] = ()


@dataclass
class Found:
    """Found is the outcome of a search: the proposal that fits (or None), and the rejected layouts,
    each with the reason why it does not fit. `refusal`: the violated rule if every layout violates
    one. `engines`: number of engine sizes that fit into the memory of the devices.
    """

    proposal: Proposal | None = None
    rejected: list[tuple[Changes, Misfit]] = field(default_factory=list)
    refusal: str = ""
    engines: int = 0

    @property
    def why(self) -> str:
        """Returns why nothing fits: a violation if every layout has one, otherwise the reason of the
        layout that exceeds the memory least; of the engines only if none of them fits.
        """
        if self.refusal:
            return self.refusal
        reasons = [misfit for _, misfit in self.rejected]
        others = [misfit for misfit in reasons if misfit.phase != "rollout"]
        return min((self.engines and others) or reasons, key=lambda one: one.over).reason


class Search:
    """Search covers all layouts of a run on `config.backend`.

    `models`: the models of `config` by name; `wider`: also try context parallelism (Megatron), or
    parameters in host memory (FSDP2).
    """

    def __init__(
        self,
        models: Mapping[str, PlannedModel],
        config: RunConfig,
        machine: Machine,
        *,
        wider: bool = False,
    ) -> None:
        self.models, self.config, self.machine, self._wider = models, config, machine, wider
        self._no_engines: list[tuple[int, Changes, Misfit]] = []
        self._no_trainers: list[tuple[int, Changes, Misfit]] = []
        self._engines = self._of_engines()
        self._trainers = self._of_trainers()

    def first(self, order: Order) -> Found:
        """Returns the "quickest" layout that fits, or the "nearest": the quickest of those with the
        fewest changes.

        Among layouts that are equally quick within a roofline's error, the search for the quickest
        prefers few pipeline stages and large micro-batches.
        """
        pairs = self._pairs()
        if order == "nearest":
            pairs.sort(key=lambda pair: (_moved(pair), _options(pair), _seconds(pair)))
            return self._first(pairs)
        pairs.sort(key=lambda pair: (_seconds(pair), _moved(pair)))
        found = self._first(pairs)
        if found.proposal is None:
            return found
        bound = ALIKE * found.proposal.seconds
        alike = [pair for pair in pairs if _seconds(pair) <= bound]
        alike.sort(key=lambda pair: (pair[0].simple, _seconds(pair), _moved(pair)))
        simplest = self._first(alike)
        return simplest if simplest.proposal else found

    def _first(self, pairs: Iterable[tuple[Alternative, Alternative]]) -> Found:
        """Returns the first of `pairs` (trainer layout, engine size) that can run and fits into
        memory, and the rejected layouts with the reasons why they do not fit.
        """
        found = Found(engines=len(self._engines))
        failed: set[int] = set()
        not_allowed, most = 0, math.inf
        for trainer, engine in pairs:
            if id(trainer) in failed:
                continue
            told = self._told({**trainer.changes, **engine.changes})
            candidate = changed(self.config, told)
            if problems := refused(self.models, candidate, self.machine):
                found.refusal = found.refusal or ("" if found.rejected else problems[0])
                not_allowed += 1
                if not_allowed == MOST:
                    break
                continue
            found.refusal = ""
            reasons = self._reasons(candidate)
            if not reasons:
                most = _moved((trainer, engine))
                found.proposal = Proposal(told, _seconds((trainer, engine)), candidate)
                break
            found.rejected.append((told, max(reasons, key=lambda reason: reason.over)))
            if any(reason.phase.startswith(TRAINER) for reason in reasons):
                failed.add(id(trainer))
            if len(found.rejected) == MOST:
                break
        for moved, changes, misfit in (*self._no_trainers, *self._no_engines):
            if moved <= most:
                found.rejected.append((changes, misfit))
        return found

    def _reasons(self, candidate: RunConfig) -> list[Misfit]:
        models = laid_out(self.models, candidate)
        bound = push_bound(models[POLICY], candidate)
        return misfits(models, candidate, self.machine, bound)

    def _pairs(self) -> list[tuple[Alternative, Alternative]]:
        memory, found = self.machine.budget.memory, []
        for trainer in self._trainers:
            near = [
                (trainer, engine)
                for engine in self._engines
                if not trainer.stays or trainer.stays + engine.stays <= memory
            ]
            found += near
            if self._engines and not near:
                reason = f"rollout: the trainer keeps {trainer.stays / GB:.1f} GB of {memory / GB:g}, beside which no engine fits"
                least = min(engine.stays for engine in self._engines)
                misfit = Misfit(reason, (trainer.stays + least) / memory, "rollout")
                self._no_trainers.append((trainer.moved, self._told(trainer.changes), misfit))
        return found

    def _told(self, changes: Changes) -> dict[str, Any]:
        """Returns the `changes` (dotted option name -> value) whose values differ from the
        config's.
        """
        return {
            name: value for name, value in changes.items() if value != value_of(self.config, name)
        }

    def _of_engines(self) -> list[Alternative]:
        """Lists the engine sizes that leave memory for the KV cache of one completion."""
        if self.config.algorithm.task != "rl":
            return [Alternative({}, 0, 0.0)]
        now, policy = self.config.rollout, self.models[POLICY]
        world = self.machine.trainers(self.config)
        sizes = _with(now.tensor, powers(min(world, LONGEST_ENGINE)))
        separate = self.config.strategy == "separate"
        found = []
        for ranks, share in product(sizes, _with(now.memory_fraction, FRACTIONS)):
            changes = {"rollout.tensor": ranks, "rollout.memory_fraction": share}
            if not self._engine_runs(policy, ranks):
                continue
            candidate = changed(self.config, changes)
            moved = (ranks != now.tensor) + (share != now.memory_fraction)
            if misfit := engine_misfit(policy, candidate, self.machine.budget):
                self._no_engines.append((moved, self._told(changes), misfit))
                continue
            held = 0.0 if separate else share * self.machine.budget.memory
            found.append(Alternative(changes, moved, self._rolled(candidate), held))
        return found

    def _engine_runs(self, policy: PlannedModel, ranks: int) -> bool:
        over = nodes_of_engine(ranks, self.machine.speeds.node)
        separate = self.config.strategy == "separate"
        whole = separate or self.machine.trainers(self.config) % ranks == 0
        fits_nodes = over == 1 or (over > 1 and not separate)
        return whole and fits_nodes and not heads_violations(policy.model, ranks, "rollout.tensor")

    def _rolled(self, config: RunConfig) -> float:
        """Returns a lower bound of the seconds in which all engines together generate a step's
        completions.
        """
        policy, world = self.models[POLICY], self.machine.trainers(config)
        separate = config.strategy == "separate"
        engines = config.rollout.servers if separate else world // config.rollout.tensor
        prompts = config.trainer.prompts_per_step / engines
        cache = cache_of(policy, config, self.machine.budget)
        return sum(generated(policy, config, prompts, cache, self.machine.speeds).busy.values())

    def _of_trainers(self) -> list[Alternative]:
        """Lists the trainer layouts whose sizes divide evenly, and whose weights, gradients,
        optimizer states and activations fit.
        """
        memory, world = self.machine.budget.memory, self.machine.trainers(self.config)
        rl = self.config.algorithm.task == "rl"
        found = []
        for values in product(*self.axes()):
            changes = {name: value for part in values for name, value in part.items()}
            candidate = changed(self.config, changes)
            moved = sum(map(bool, values))
            if not self._divides(candidate):
                continue
            try:
                models = laid_out(self.models, candidate)
            except CheckpointError:  # matrices that can't be sharded among so many processes
                continue
            held = self._held(models[POLICY], candidate, world)
            over = (sum(held.values()) + self.machine.budget.reserved) / memory
            if over > 1:
                stored, reserved = held.pop(ACTIVATIONS), self.machine.budget.reserved
                told = (
                    f"weights, gradients and optimizer take {sum(held.values()) / GB:.1f}, "
                    f"activations {stored / GB:.1f}, and {reserved / GB:g} are reserved"
                )
                misfit = Misfit(
                    f"update needs more than {memory / GB:g} GB: {told}", over, "update"
                )
                self._no_trainers.append((moved, self._told(changes), misfit))
                continue
            stays = 0.0
            if rl and not candidate.trainer.offload:
                stays = self._stays(models[POLICY], candidate, world)
            phases = seconds(models, candidate, world, None, None, self.machine.speeds)
            took = sum(sum(parts.values()) for parts in phases.values())
            now = candidate.parallel
            tokens = candidate.trainer.max_tokens_per_micro_batch
            spread = now.expert * now.expert_tensor > self.machine.speeds.node
            simple = (spread, now.pipeline, now.virtual_pipeline, now.tensor, -tokens)
            found.append(Alternative(changes, moved, took, stays, simple))
        return found

    def axes(self) -> list[Axis]:
        """Lists the trainer's settings that the search varies, each as a list of its values."""
        found = self._of_stages() if backend_of(self.config).layouts else self._of_shards()
        rl = self.config.algorithm.task == "rl"
        return [*found, self._axis([{"trainer.offload": True}] if rl else [])]

    def _held(self, policy: PlannedModel, config: RunConfig, world: int) -> dict[str, int]:
        """Returns kind -> bytes of weights, gradients, optimizer states and activations in an
        update, on one process of the policy's fullest pipeline stage. `world`: number of trainer
        processes.
        """
        load = load_of(config, policy.parallel, world)
        found = []
        for stage in {0, policy.parallel.pipeline - 1}:
            held = {GRADIENTS: 0} if policy.parallel.cpu_offload else states(policy, world, stage)
            found.append({**held, ACTIVATIONS: training(policy, stage, load)})
        return max(found, key=lambda kinds: sum(kinds.values()))

    def _stays(self, policy: PlannedModel, config: RunConfig, world: int) -> float:
        """Returns the most bytes of weights and optimizer states that a process keeps in a rollout
        without offload.
        """
        if policy.parallel.cpu_offload:
            return 0.0
        freed = backend_of(config).frees_gradients
        return max(
            sum(kinds.values()) - kinds[GRADIENTS] * freed
            for stage in {0, policy.parallel.pipeline - 1}
            for kinds in [states(policy, world, stage)]
        )

    def _divides(self, config: RunConfig) -> bool:
        """Returns whether the sizes of a layout fit the processes, the layers and the experts."""
        world, parallel = self.machine.trainers(config), config.parallel
        model = self.models[POLICY].model
        if heads_violations(model, parallel.tensor, "parallel.tensor"):
            return False
        if not backend_of(config).layouts:
            return world % (parallel.tensor * parallel.replicas) == 0
        dense = parallel.tensor * parallel.context * parallel.pipeline
        experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
        if world % dense or world % experts:
            return False
        if model.experts and model.experts.number % parallel.expert:
            return False
        if (net := model.delta_net) and net.key_heads % (parallel.tensor * parallel.context):
            return False
        try:
            stages = stage_layers(model.layers, parallel)
        except ValueError:
            return False
        largest = max(sum(map(len, chunks)) for chunks in stages)
        own = parallel.pipeline == self.config.parallel.pipeline
        return own or largest * parallel.pipeline <= UNEVEN * model.layers

    def _axis(self, values: Iterable[Changes]) -> Axis:
        """Returns the distinct `values` of one setting, as changes to the config (dotted option
        name -> value); the first is {}, the config's own value.
        """
        found: Axis = [{}]
        for value in map(self._told, values):
            if value not in found:
                found.append(value)
        return found

    def _of_stages(self) -> list[Axis]:
        """Lists the settings that the search varies for a trainer on Megatron."""
        now, model = self.config.parallel, self.models[POLICY].model
        twos = powers(self.machine.trainers(self.config))
        experts = twos if model.experts else []
        whole = self.config.optimizer.distributed is False and self.config.optimizer.name == "adam"
        return [
            self._axis(
                {"parallel.tensor": t, "parallel.sequence": t > 1}
                for t in _with(now.tensor, [t for t in twos if t <= self.machine.speeds.node])
            ),
            self._axis(
                {
                    "parallel.pipeline": p,
                    "parallel.virtual_pipeline": v,
                    **stage_options(model.layers, p),
                }
                for p in _with(now.pipeline, [p for p in twos if p <= model.layers])
                for v in (1, 2, 4)
                if v == 1 or (p > 1 and model.layers % (p * v) == 0)
            ),
            self._axis({"parallel.context": c} for c in (LONGER if self._wider else (1,))),
            self._axis({"parallel.expert": e, "parallel.expert_tensor": 1} for e in experts),
            self._axis([{"parallel.recompute": "none"}, {"parallel.recompute": "full"}]),
            self._axis([{"optimizer.distributed": True}] if whole else []),
            *self._less_at_once(),
        ]

    def _of_shards(self) -> list[Axis]:
        """Lists the settings that the search varies for a trainer on FSDP2."""
        now, world = self.config.parallel, self.machine.trainers(self.config)
        sharding: list[Changes] = [
            {"parallel.reshard_after_forward": freed, "parallel.cpu_offload": False}
            for freed in (True, False)
        ]
        if self._wider:
            sharding = [{"parallel.reshard_after_forward": True, "parallel.cpu_offload": True}]
        shared = powers(min(self.machine.speeds.node, world))
        return [
            self._axis({"parallel.tensor": t} for t in _with(now.tensor, shared)),
            self._axis({"parallel.replicas": n} for n in _with(now.replicas, powers(world))),
            self._axis(sharding),
            self._axis([{"parallel.recompute": "none"}, {"parallel.recompute": "full"}]),
            *self._less_at_once(),
        ]

    def _less_at_once(self) -> list[Axis]:
        """Lists the two settings that make micro-batches smaller: at most the tokens of one
        sequence of maximum length, and at most the image patches of one prompt.
        """
        config, model = self.config, self.models[POLICY].model
        longest, bound = config.rollout.max_row_tokens, config.trainer.max_patches_per_micro_batch
        shorter = longest < config.trainer.max_tokens_per_micro_batch
        pairs = config.given_rows == 2 or config.reward.scoring_models()
        patches = patches_of_prompt(model, config)
        fewer = patches and (not bound or patches < bound)
        return [
            self._axis(
                [{"trainer.max_tokens_per_micro_batch": longest}] if shorter and not pairs else []
            ),
            self._axis([{"trainer.max_patches_per_micro_batch": patches}] if fewer else []),
        ]


def found_layout(
    models: Mapping[str, PlannedModel], config: RunConfig, machine: Machine, order: Order
) -> Found:
    """Returns the quickest or the nearest layout that fits, and the rejected layouts. `order`:
    "quickest" or "nearest", see `Search.first`.

    Times omit the communication of context parallelism and the cost of Adam on the host. So context
    parallelism and parameters on the host are tried only if no other layout fits.
    """
    found = Search(models, config, machine).first(order)
    if found.proposal is None:
        wider = Search(models, config, machine, wider=True).first(order)
        if wider.proposal is not None:
            return wider
    return found


def powers(most: int) -> list[int]:
    """Returns the powers of 2 up to `most`."""
    return [2**n for n in range(int(math.log2(max(most, 1))) + 1)]


def stage_options(layers: int, number: int) -> dict[str, int]:
    """Returns the config options (dotted name -> value) that distribute `layers` layers over
    `number` pipeline stages. If they do not divide evenly, the last stage, which also holds the LM
    head, gets fewer layers.
    """
    last = layers - (number - 1) * math.ceil(layers / number)
    while last < 1 or (number > 1 and (layers - last) % (number - 1)):
        last += 1
    return {
        "parallel.first_stage_layers": 0,
        "parallel.last_stage_layers": 0 if layers % number == 0 else last,
    }


def _with(own: Any, values: Iterable[Any]) -> list[Any]:
    """Returns `own`, followed by the `values` that differ from it."""
    return [own, *(value for value in values if value != own)]


def _seconds(pair: tuple[Alternative, Alternative]) -> float:
    return pair[0].seconds + pair[1].seconds


def _moved(pair: tuple[Alternative, Alternative]) -> int:
    return pair[0].moved + pair[1].moved


def _options(pair: tuple[Alternative, Alternative]) -> int:
    return len(pair[0].changes) + len(pair[1].changes)
