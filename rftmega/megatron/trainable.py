"""MegatronModel is a model on Megatron-Core as strategy, weights and checkpoints know it."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rftmega.checkpoint.training import StoredModel
from rftmega.device.residency import MAIN_PARAMETERS, PARAMETERS, Residency
from rftmega.megatron.held_weights import AveragedWeights
from rftmega.megatron.manager import MegatronModelManager
from rftmega.megatron.training_state import (
    AVERAGE,
    WEIGHTS,
    adam_steps,
    model_tensors,
    optimizer_tensors,
    schedule_steps,
    set_adam_steps,
    set_schedule_steps,
)
from rftmega.parallel.topology import Topology
from rftmega.shards import Shard, ShardBox


class MegatronModel:
    """MegatronModel holds what a policy and a value model have in common: see
    `strategy.backend.Trainable`.
    """

    average: AveragedWeights | None = None

    def __init__(self, manager: MegatronModelManager, topology: Topology):
        self.manager, self.topology = manager, topology

    @property
    def residency(self) -> Residency:
        return self.manager.residency

    def shards(self) -> list[Shard]:
        return self.manager.shards()

    def training_tensors(self) -> Iterator[ShardBox]:
        self.manager.finish_param_sync()
        yield from model_tensors(self.manager, self.average)
        yield from optimizer_tensors(self.manager)

    def described(self) -> dict[str, Any]:
        """Returns "hf_config", "dtype", "layout" and, for messages, the "path" that it was built
        from.
        """
        cfg = self.manager.cfg
        return {
            "hf_config": self.manager.hf_config,
            "dtype": str(self.manager.config.params_dtype),
            "layout": asdict(cfg.parallel),
            "path": cfg.model.path,
        }

    def counters(self) -> dict[str, int]:
        return {
            "adam_steps": adam_steps(self.manager),
            "schedule_steps": schedule_steps(self.manager),
        }

    def restore(
        self, stored: StoredModel, *, strict: bool, optimizer: bool, schedule: bool
    ) -> None:
        """Takes back weights and, where asked for, the optimizer's state and the schedule.

        Without `strict`, weights that the checkpoint lacks stay as they are. Raises CheckpointError
        where it lacks others, or is not as it was written.
        """
        manager = self.manager
        stored.fill(
            box
            for box in model_tensors(manager, self.average)
            if box.key in stored or (strict and box.key.startswith(f"{WEIGHTS}/"))
        )
        restarts = self.average is not None and not stored.holds(AVERAGE)
        if restarts or not optimizer:  # what copies the weights finds them on the device alone
            self.residency.on(PARAMETERS, MAIN_PARAMETERS)
        if self.average is not None and restarts:
            self.average.restart()
        if optimizer:
            set_adam_steps(manager, stored.said["adam_steps"])
            stored.fill(optimizer_tensors(manager))
            self.residency.changed()
        else:
            manager.weights_changed()
        if schedule:
            set_schedule_steps(manager, stored.said["schedule_steps"])

    def random_state(self) -> dict[str, Any]:
        return self.topology.random_state()

    def set_random_state(self, state: dict[str, Any]) -> None:
        self.topology.set_random_state(state)
