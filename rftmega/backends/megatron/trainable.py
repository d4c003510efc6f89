"""MegatronModel gives strategies, weight sync and checkpoints access to a Megatron-Core model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from rftmega.backends.megatron.manager import MegatronModelManager
from rftmega.backends.megatron.model_runner import MegatronRunner
from rftmega.backends.megatron.training_state import (
    AVERAGE,
    WEIGHTS,
    adam_steps,
    model_tensors,
    optimizer_tensors,
    read_main_parameters,
    schedule_steps,
    set_adam_steps,
    set_schedule_steps,
)
from rftmega.backends.optimizers.moments import MomentValues
from rftmega.checkpoints.training_files import StoredModel
from rftmega.core.shards import Shard, ShardBox, TrainedAdapters
from rftmega.core.types import Metrics
from rftmega.model_providers.description import ModelDescription
from rftmega.runtime.device.held_weights import AveragedWeights
from rftmega.runtime.device.residency import MAIN_PARAMETERS, PARAMETERS, Residency
from rftmega.runtime.parallel.layout import layout_name
from rftmega.runtime.parallel.topology import Topology


class MegatronModel:
    """MegatronModel is the common base of a policy and a value model; it implements
    `run.placement.backend.Trainable`.
    """

    average: AveragedWeights | None = None
    sum_of_frozen: int | None = None  # checksum of the reference, or of a reward model
    runner: MegatronRunner

    def __init__(self, manager: MegatronModelManager, topology: Topology):
        self.manager, self.topology = manager, topology

    def prepare_to_learn(self) -> None:
        """Builds the optimizer and the learning-rate schedule, and reads the main parameters."""
        self.manager.setup_model_and_optimizer()
        read_main_parameters(self.manager)

    @property
    def path(self) -> str:
        return self.manager.cfg.model.path

    @property
    def description(self) -> ModelDescription:
        return self.manager.description

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.manager.config.params_dtype
        return found

    @property
    def layout(self) -> str:
        return layout_name(self.manager.cfg.parallel, self.topology.data)

    @property
    def label(self) -> str:
        """Returns a label of this process, e.g. "rank 5: tensor 1, stage 1, data 0"."""
        at = self.topology
        place = f"tensor {at.tensor_rank}, stage {at.pipeline_rank}, data {at.data_rank}"
        return f"rank {dist.get_rank()}: {place}"

    @property
    def residency(self) -> Residency:
        return self.manager.residency

    @property
    def replica_group(self) -> Any:
        return self.topology.replica_group

    @property
    def classifier(self) -> bool:
        return self.manager.value_model

    @property
    def step(self) -> Callable[..., Metrics]:
        """Returns the method that takes one optimizer step, `ModelRunner.step`."""
        return self.runner.step

    @property
    def forward(self) -> Callable[..., Any]:
        """Returns the method that runs rows with gradient, `ModelRunner.forward`."""
        return self.runner.forward

    @property
    def why_no_backward(self) -> str:
        """Returns why `forward` can't run, see the manager; "" if it can."""
        return self.manager.why_no_backward

    def averaged(self) -> AbstractContextManager[None] | None:
        """Returns a context in which the model computes with its averaged weights; None if no
        average is kept.
        """
        return None if self.average is None else self.average.swapped_in()

    def shards(self) -> list[Shard]:
        return self.manager.shards()

    def frozen_shards(self) -> list[Shard]:
        return self.manager.frozen_shards()

    def adapters(self) -> TrainedAdapters | None:
        if (held := self.manager.adapters) is None:
            return None
        lora = self.manager.cfg.model.lora
        shards, head = tuple(held.shards()), tuple(item.shard() for item in self.manager.head)
        return TrainedAdapters(shards, lora.rank, lora.alpha, lora.dropout, lora.rslora, head)

    def training_tensors(self) -> Iterator[ShardBox]:
        self.manager.finish_param_sync()
        yield from model_tensors(self.manager, self.average)
        yield from optimizer_tensors(self.manager)

    def described(self) -> dict[str, Any]:
        """Returns a description of the model for a checkpoint.

        Its keys are "hf_config", "dtype", "layout" and "path" (the folder of the initial weights,
        for messages); with adapters also "adapters", "base", a checksum of the frozen weights, and
        "base_dtypes", the dtypes of those that are not of "dtype"; with a frozen reference
        "reference", its checksum.
        """
        cfg = self.manager.cfg
        said: dict[str, Any] = {
            "hf_config": self.manager.hf_config,
            "dtype": str(self.manager.config.params_dtype),
            "layout": asdict(cfg.parallel),
            "path": cfg.model.path,
        }
        if (adapters := self.manager.adapters) is not None:
            said["adapters"] = cfg.model.lora.told(adapters.targets)
            said["base"] = self.manager.sum_of_base
            said["base_dtypes"] = self.manager.base_dtypes
        if self.sum_of_frozen is not None:
            said["reference"] = self.sum_of_frozen
        return said

    def counters(self) -> dict[str, int]:
        return {
            "adam_steps": adam_steps(self.manager),
            "schedule_steps": schedule_steps(self.manager),
        }

    def restore(
        self, stored: StoredModel, *, strict: bool, optimizer: bool, schedule: bool
    ) -> None:
        """Restores weights and, with `optimizer` and `schedule`, the optimizer's state and the
        learning-rate schedule.

        `stored` reads this model's tensors from a training checkpoint. Without `strict`, weights
        that the checkpoint lacks stay as they are. Raises CheckpointError if a required tensor is
        missing, or if the checkpoint is corrupt.
        """
        manager = self.manager
        stored.fill(
            box
            for box in model_tensors(manager, self.average)
            if box.key in stored or (strict and box.key.startswith(f"{WEIGHTS}/"))
        )
        restarts = self.average is not None and not stored.holds(AVERAGE)
        if restarts or not optimizer:  # weights are copied from the device only
            self.residency.on(PARAMETERS, MAIN_PARAMETERS)
        if self.average is not None and restarts:
            self.average.restart()
        if optimizer:
            set_adam_steps(manager, stored.said["adam_steps"])
            moments = MomentValues(self.residency)
            stored.fill(optimizer_tensors(manager, moments))
            moments.take_back()
            self.residency.changed()
        else:
            manager.weights_changed()
        if schedule:
            set_schedule_steps(manager, stored.said["schedule_steps"])

    def random_state(self) -> dict[str, Any]:
        return self.topology.random_state()

    def set_random_state(self, state: dict[str, Any]) -> None:
        self.topology.set_random_state(state)
