"""MegatronStrategy: builds and places policy, engine and weight transfer for a colocated run on Megatron-Core."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from rftmega import rollout, weights
from rftmega.config import RunConfig
from rftmega.device import current
from rftmega.interfaces import Policy, RolloutEngine, WeightSync
from rftmega.megatron import MegatronActor, MegatronModelManager
from rftmega.parallel.launch import World
from rftmega.parallel.topology import Topology
from rftmega.strategy.dispatch import SharedEngine, TakingTurns

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronStrategy:
    """Every process holds its shard of the actor and an engine (or its slice of one); they take turns."""

    def __init__(self, config: RunConfig, world: World, *, stop_ids: Sequence[int]):
        self.config = config
        self.topology = Topology.create(config.parallel, seed=config.trainer.seed)
        manager = MegatronModelManager(
            config.model.path,
            config.parallel,
            self.topology,
            dtype=DTYPES.get(config.model.dtype, current().train_dtype),
            where=world.device,
        )
        manager.setup_model_and_optimizer(config.optimizer, optimizer_steps=config.trainer.steps * config.algorithm.mini_batches)
        actor = MegatronActor(
            manager,
            temperature=config.rollout.temperature,
            token_cap=config.trainer.max_tokens_per_micro_batch,
            mini_batches=config.algorithm.mini_batches,
            keep_reference=config.algorithm.kl_coef > 0,
        )
        if world.is_main:
            topology = self.topology
            log.info(
                "policy: %s, %s parameters in %s, TP%d x PP%d x DP%d; engines: %d x %s",
                manager.description.family,
                f"{manager.description.parameters:,}",
                str(manager.config.params_dtype).removeprefix("torch."),
                *(topology.tensor, topology.pipeline, topology.data),
                world.size // config.rollout.tensor,
                config.rollout.engine,
            )
        self._engine = rollout.create(config, world, vocabulary=manager.description.vocabulary, stop_ids=stop_ids)
        self._exporter = weights.Exporter(manager.bound, self.topology, bucket_bytes=config.trainer.push_bucket_mib * 2**20)
        self.policy: Policy = TakingTurns(actor, self._engine)
        self.engine: RolloutEngine = SharedEngine(self._engine, world, processes_per_engine=config.rollout.tensor)
        self.weights: WeightSync = weights.EngineWeights(self._exporter, self._engine)

    def export(self, folder: str | Path) -> None:
        """Writes the policy as a Hugging Face folder; every process calls it."""
        weights.export_hf_folder(self._exporter, self.config.model.path, folder, write=self.topology.is_main)

    def close(self) -> None:
        """Ends the engine, which must be gone before the process groups are."""
        self._engine.close()
