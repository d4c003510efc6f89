"""ReinforcementStrategy builds a run's policy, value models, engine and weight sync, and assigns
them to devices.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from rftmega.checkpoints.run_checkpoints import TrainedModel, TrainingCheckpoints, of_run
from rftmega.config import LoRA, RunConfig, served_rank, why_merged
from rftmega.core.errors import ConfigError
from rftmega.core.interfaces import (
    Environment,
    Host,
    Numerics,
    Policy,
    RolloutEngine,
    ValueModel,
    WeightSync,
)
from rftmega.core.shards import AdapterSource
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.rollout.pool.engine_pool import EnginePool, ServerPool
from rftmega.rollout.pool.partial_rollout_pool import PartialRolloutPool
from rftmega.rollout.pool.streaming_pool import StreamingPool
from rftmega.run.placement import engines, teachers
from rftmega.run.placement.backend import Backend, Trainable, TrainableValues
from rftmega.run.placement.colocated import ColocatedPolicy, ColocatedValues
from rftmega.run.placement.export import export, rehearse
from rftmega.run.placement.numerics import EngineNumerics
from rftmega.run.placement.phase_memory import predicted
from rftmega.run.placement.phases import POLICY, DevicePhases
from rftmega.runtime.parallel import host_memory
from rftmega.runtime.parallel.process_group import World, undone
from rftmega.runtime.parallel.seeds import set_seed

log = logging.getLogger(__name__)
Built = TypeVar("Built", bound=Trainable)


class ReinforcementStrategy:
    """ReinforcementStrategy connects the models and the engines of a run.

    Every process holds a shard of the policy. With strategy=colocated it also holds an engine or a
    shard of one, and the two use the device in turns; with strategy=separate the engines are
    servers on other devices.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        backend: Backend,
        *,
        stop_ids: Sequence[int],
        environment: Environment | None = None,
    ):
        """`stop_ids`: tokens that end a completion. `environment`: the environment of the rollouts;
        None: a single turn.
        """
        self.config, self.is_main = config, world.is_main
        if config.strategy == "separate" and world.local_size != world.size:
            raise ConfigError(
                f"strategy=separate shares memory with its servers, so all {world.size} processes must be on one host; this one "
                f"has {world.local_size} of them. Take strategy=colocated."
            )
        set_seed(config.trainer.seed)
        self.backend = backend
        actor = self.actor = backend.policy(config)
        rehearse(actor, config)
        self._built(actor)
        self.label = actor.label
        judges = self._build_value_models()
        self._teachers = teachers.build(config, backend, is_main=world.is_main)
        for teacher in self._teachers.values():
            self._built(teacher)
        if config.algorithm.teachers:
            actor.learn_from(teachers.terms_of(config, actor, self._teachers))
        self._frozen: dict[str, int] = {
            f"algorithm.teachers: {name}": teacher.sum_of_frozen
            for name, teacher in self._teachers.items()
            if teacher.sum_of_frozen is not None
        }
        for name, chosen in config.reward.scoring_models().items():
            if (total := judges[name].sum_of_frozen) is not None:
                self._frozen[chosen.option] = total
        self.trained: dict[str, TrainedModel] = {
            name: model for name, model in judges.items() if name == "critic"
        } | {POLICY: actor}
        separate = config.strategy == "separate"
        if world.is_main:
            log.info(
                "policy: %s, %s parameters in %s, %s; engines: %d x %s, %s",
                actor.description.family,
                f"{actor.description.parameters:,}",
                str(actor.dtype).removeprefix("torch."),
                actor.layout,
                config.rollout.servers if separate else world.size // config.rollout.tensor,
                config.rollout.engine,
                config.strategy,
            )
        models = {POLICY: actor.residency} | {
            name: model.residency for name, model in (judges | self._teachers).items()
        }
        self.phases = DevicePhases(
            models, offload=config.trainer.offload, predicted=predicted(config, world)
        )
        self.phases.start()
        self.local_engine = engines.create(
            config,
            world,
            vocabulary=actor.description.vocabulary,
            stop_ids=stop_ids,
            experts=actor.description.experts,
        )
        with undone(world, self.local_engine.close):
            self._join_engine(world, environment or SingleTurnEnvironment(), judges)

    def _join_engine(
        self, world: World, environment: Environment, judges: Mapping[str, TrainableValues]
    ) -> None:
        """Connects the engine with the models: device phases, the pool that serves rollout
        requests, and weight sync. `judges`: the value models by name: "critic", "reward_model", "cost_model".
        """
        config, actor = self.config, self.actor
        separate = config.strategy == "separate"
        if not separate:
            self.phases.engine = self.local_engine
            self.local_engine.sleep()  # it holds all that it may, and the trainer comes back
        self.phases.push()
        self.host: Host = host_memory.current()
        self.numerics: Numerics = EngineNumerics(actor, is_main=world.is_main)
        self._bucket_bytes = config.trainer.push_bucket_mib * 2**20
        self.policy: Policy = ColocatedPolicy(actor, self.phases)
        faces = {name: ColocatedValues(model, self.phases, name) for name, model in judges.items()}
        self.critic: ValueModel | None = faces.get("critic")
        self.scoring_models: Mapping[str, ValueModel] = {
            name: faces[name] for name in config.reward.scoring_models()
        }
        self.teachers = teachers.scorers(config, actor, self._teachers, self.phases, world)
        face: Any = ServerPool if separate else EnginePool
        if config.trainer.max_staleness:
            face = StreamingPool if separate else PartialRolloutPool
        self.engine_processes = world.size if separate else config.rollout.tensor
        pool: EnginePool = face(
            self.local_engine,
            self.phases,
            world,
            environment,
            processes_per_engine=self.engine_processes,
            restarts=config.faults.engine_restarts,
            reward_limit=config.reward.timeout,
            repeats=config.faults.rollout_repeats,
            most_running=config.rollout.max_running,
        )
        self.engine: RolloutEngine = pool
        self.weights: WeightSync = self._weight_sync(pool)
        actor.push_to_rollout = self.weights.push

    def _weight_sync(self, pool: EnginePool) -> WeightSync:
        """Returns the weight sync from the policy to the engines in `pool`, as model.lora.push
        selects it.
        """
        actor = self.actor
        if not served_rank(self.config):
            if self.is_main and self.config.model.lora.rank:
                log.info(
                    "Engines get merged weights: %s. push_lost_share says how much of what adapters add is lost by rounding.",
                    why_merged(self.config) or "model.lora.push=merged",
                )
            rounds = bool(self.config.model.lora.rank) and actor.dtype != torch.float32
            return pool.weight_sync(actor.shards(), bucket_bytes=self._bucket_bytes, rounds=rounds)
        adapters = actor.adapters()
        assert adapters is not None, "model.lora.push=adapters needs adapters"
        source = AdapterSource(adapters, actor.replica_group)
        return pool.adapter_sync(actor.frozen_shards(), source, bucket_bytes=self._bucket_bytes)

    def _build_value_models(self) -> dict[str, TrainableValues]:
        """Builds the configured value models: the critic, with the layout and the optimizer of its
        own section, and the reward and cost models, with the policy's layout and no optimizer. If
        the policy has adapters, the critic gets new ones of the same kind.
        """
        config, found = self.config, {}
        lora = replace(config.model.lora, path="")
        if config.algorithm.advantage.needs_critic:
            chosen = config.critic
            model = replace(config.model, path=chosen.path or config.model.path, lora=lora)
            own = replace(config, model=model, parallel=chosen.parallel, optimizer=chosen.optimizer)
            found["critic"] = self._built(self.backend.value_model(own, role="critic"))
        for name, scoring in config.reward.scoring_models().items():
            model = replace(config.model, path=scoring.path, lora=LoRA())
            own = replace(config, model=model)
            found[name] = self._built(self.backend.value_model(own, role="reward"))
        for name, built in found.items():
            if self.is_main:
                log.info(
                    "%s: %s, %s",
                    name,
                    built.path,
                    built.layout,
                )
        return found

    def _built(self, model: Built) -> Built:
        """Moves a model off the device as soon as it is built if trainer.offload is set, since the
        next model needs the memory. Returns the model.
        """
        if self.config.trainer.offload:
            model.residency.only()
        return model

    def export(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder, and its EMA to `folder`_ema if one is kept;
        every process calls it.
        """
        self.phases.push()
        export(self.actor, folder, self.config.trainer)

    @cached_property
    def checkpoints(self) -> TrainingCheckpoints:
        """Returns the TrainingCheckpoints, which save and load policy and critic as configured by
        checkpoint.*.
        """
        return of_run(self.config, self.trained, self.export, self._frozen)

    def close(self) -> None:
        """Shuts the engine down; must be called before the process groups are destroyed."""
        self.engine.close()
