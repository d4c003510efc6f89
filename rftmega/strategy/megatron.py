"""MegatronStrategy: builds and places policy, engine and weight transfer of a run on Megatron-Core."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rftmega import rollout, weights
from rftmega.config import RunConfig
from rftmega.errors import ConfigError
from rftmega.interfaces import Policy, RolloutEngine, ValueModel, WeightSync
from rftmega.megatron import MegatronActor, MegatronCritic
from rftmega.parallel.launch import World
from rftmega.parallel.layout import layout_name
from rftmega.parallel.seeds import set_seed
from rftmega.parallel.topology import Topology
from rftmega.rollout.servers import ServerEngine
from rftmega.strategy.dispatch import AskedByOne, ColocatedCritic, ColocatedPolicy, ColocatedWeights, SharedEngine, Turns

log = logging.getLogger(__name__)


class MegatronStrategy:
    """Every process holds its shard of the actor. Colocated, it holds an engine too (or its slice of one), and they take turns;
    separate, vLLM servers beside the processes are the engines.
    """

    def __init__(self, config: RunConfig, world: World, *, stop_ids: Sequence[int]):
        self.config = config
        if config.strategy == "separate" and world.local_size != world.size:
            raise ConfigError(
                f"strategy=separate shares memory with its servers, so all {world.size} processes must be on one host; this one "
                f"has {world.local_size} of them. Take strategy=colocated."
            )
        set_seed(config.trainer.seed)
        self.topology = Topology.create(config.parallel, seed=config.trainer.seed)
        actor = MegatronActor(config, self.topology)
        manager = actor.manager
        critic = self._build_critic() if config.algorithm.advantage == "gae" else None
        separate = config.strategy == "separate"
        if world.is_main:
            log.info(
                "policy: %s, %s parameters in %s, %s; engines: %d x %s, %s",
                manager.description.family,
                f"{manager.description.parameters:,}",
                str(manager.config.params_dtype).removeprefix("torch."),
                layout_name(config.parallel, self.topology.data),
                config.rollout.servers if separate else world.size // config.rollout.tensor,
                config.rollout.engine,
                config.strategy,
            )
        self._engine = rollout.create(config, world, vocabulary=manager.description.vocabulary, stop_ids=stop_ids)
        self._actor = actor
        self._bucket_bytes = config.trainer.push_bucket_mib * 2**20
        self._turns = Turns(
            manager.residency,
            None if separate else self._engine,
            critic=critic.manager.residency if critic else None,
            offload=config.trainer.offload,
        )
        self.policy: Policy = ColocatedPolicy(actor, self._turns)
        self.critic: ValueModel | None = ColocatedCritic(critic, self._turns) if critic else None
        face, an_engine = (AskedByOne, world.size) if separate else (SharedEngine, config.rollout.tensor)
        self.engine: RolloutEngine = face(self._engine, self._turns, world, processes_per_engine=an_engine)
        sync: WeightSync
        if isinstance(self._engine, ServerEngine):
            sync = weights.SharedWeights(manager.bound, self._engine, bucket_bytes=self._bucket_bytes)
        else:
            sync = weights.EngineWeights(manager.bound, self._engine, bucket_bytes=self._bucket_bytes)
        self.weights: WeightSync = ColocatedWeights(sync, self._turns)
        actor.push_to_rollout = self.weights.push

    def _build_critic(self) -> MegatronCritic:
        """With the layout and the optimizer of its own section."""
        chosen = self.config.critic
        model = replace(self.config.model, path=chosen.path or self.config.model.path)
        config = replace(self.config, model=model, parallel=chosen.parallel, optimizer=chosen.optimizer)
        critic = MegatronCritic(config, Topology.create(chosen.parallel, seed=self.config.trainer.seed))
        if self.topology.is_main:
            log.info("critic: %s", layout_name(chosen.parallel, critic.topology.data))
        return critic

    def export(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder, and beside it `folder`_ema where an average is kept; every process
        calls it.
        """
        self._turns.push()
        self._export(folder)
        if self._actor.average is not None:
            with self._actor.average.swapped_in():
                self._export(f"{folder}_ema")

    def _export(self, folder: str | Path) -> None:
        exporter = weights.Exporter(self._actor.manager.bound, self.topology, bucket_bytes=self._bucket_bytes)
        weights.export_hf_folder(exporter, self.config.model.path, folder, write=self.topology.is_main)

    def close(self) -> None:
        """Ends the engine, which must be gone before the process groups are."""
        self._engine.close()
