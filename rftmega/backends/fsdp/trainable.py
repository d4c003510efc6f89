"""FSDPModel gives strategies, weight sync and checkpoints access to an FSDP2 model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.backends.fsdp.manager import FIRST, MOMENTS, FSDPModelManager
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.parameter_rows import Weight
from rftmega.backends.fsdp.runner import FSDPRunner
from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
from rftmega.checkpoints.training_files import StoredModel
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import Shard, ShardBox, TrainedAdapters
from rftmega.core.types import Metrics
from rftmega.model_providers.description import ModelDescription
from rftmega.runtime.device.held_weights import AveragedWeights
from rftmega.runtime.device.residency import PARAMETERS, Residency
from rftmega.runtime.parallel.seeds import as_bytes, as_text

WEIGHTS, AVERAGE, MAIN = "weights", "average", "main"


class FSDPModel:
    """FSDPModel is the common base of a policy and a value model; it implements
    `run.placement.backend.Trainable`.
    """

    average: AveragedWeights | None = None
    sum_of_frozen: int | None = None  # checksum of the reference, or of a reward model
    runner: FSDPRunner

    def __init__(self, manager: FSDPModelManager, placement: ShardingMesh):
        self.manager, self.placement = manager, placement

    @property
    def path(self) -> str:
        return self.manager.cfg.model.path

    @property
    def description(self) -> ModelDescription:
        return self.manager.description

    @property
    def dtype(self) -> torch.dtype:
        return self.manager.dtype

    @property
    def layout(self) -> str:
        return self.placement.layout

    @property
    def label(self) -> str:
        """Returns a label of this process, e.g. "rank 5: shard 1, replica 2"."""
        at = self.placement
        shared = f"tensor {at.tensor_rank}, " if at.tensor > 1 else ""
        return f"rank {dist.get_rank()}: {shared}shard {at.shard_rank}, replica {at.replica}"

    @property
    def residency(self) -> Residency:
        return self.manager.residency

    @property
    def replica_group(self) -> Any:
        return self.placement.replica_group

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
        return None if self.average is None else self._averaged(self.average)

    @contextmanager
    def _averaged(self, average: AveragedWeights) -> Iterator[None]:
        with average.swapped_in():
            self.manager.rows_changed()
            self.manager.finish_param_sync()
            yield
        self.manager.rows_changed()

    def shards(self) -> list[Shard]:
        """Returns this process's shards of the model in the forward pass's dtype."""
        return self.manager.shards()

    def frozen_shards(self) -> list[Shard]:
        return self.manager.frozen_shards()

    def adapters(self) -> TrainedAdapters | None:
        if (held := self.manager.adapters) is None:
            return None
        lora = self.manager.cfg.model.lora
        shards = tuple(held.shards())
        head = tuple(shard for weight in self.manager.head for shard in weight.shards())
        return TrainedAdapters(shards, lora.rank, lora.alpha, lora.dropout, lora.rslora, head)

    def training_tensors(self) -> Iterator[ShardBox]:
        self.manager.finish_param_sync()
        yield from self._model_tensors()
        yield from self._optimizer_tensors()

    def _model_tensors(self) -> Iterator[ShardBox]:
        averages = self.average.held if self.average is not None else None
        for number, weight in enumerate(self.manager.trained):
            yield from self._boxes(WEIGHTS, weight, self.residency.host(weight.pushed))
            if averages is not None:
                yield from self._boxes(AVERAGE, weight, averages[number])
        for weight in self.manager.buffers if self.manager.adapters is None else ():
            yield from self._boxes(WEIGHTS, weight, self.residency.host(weight.rows))

    def _optimizer_tensors(self) -> Iterator[ShardBox]:
        """Yields the float32 main parameters, if they are separate from the weights, and Adam's
        moments, if they exist yet.
        """
        optimizer = self.manager.optimizer
        for weight in self.manager.trained if optimizer is not None else ():
            assert optimizer is not None
            if weight.pushed is not weight.rows:
                yield from self._boxes(MAIN, weight, self.residency.host(weight.rows))
            state = optimizer.state.get(weight.rows, {})
            for name in MOMENTS:
                if name in state:
                    yield from self._boxes(name, weight, self.residency.host(state[name]))

    def _boxes(self, kind: str, weight: Weight, tensor: Tensor) -> Iterator[ShardBox]:
        written = self.placement.writes(weight.split, whole=weight.whole)
        for plan in weight.plans:
            shard = plan.of(tensor)
            for number, name in enumerate(shard.logical.names):
                shape = shard.logical.shapes[number]
                for box, held in shard.views(number):
                    offset = tuple(start for start, _ in box)
                    yield ShardBox(f"{kind}/{name}", shape, False, offset, held, written)

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
            "dtype": str(self.dtype),
            "layout": asdict(cfg.parallel) | {"backend": cfg.backend},
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
            "adam_steps": self.manager.adam_steps,
            "schedule_steps": self.manager.schedule_steps,
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
            for box in self._model_tensors()
            if box.key in stored or (strict and box.key.startswith(f"{WEIGHTS}/"))
        )
        restarts = self.average is not None and not stored.holds(AVERAGE)
        merges = manager.adapters is not None
        # weights are copied from the device only
        if restarts or not optimizer or merges:
            self.residency.on(PARAMETERS)
        if self.average is not None and restarts:
            self.average.restart()
        if optimizer:
            manager.set_adam_steps(
                stored.said["adam_steps"],
                lambda weight: all(f"{FIRST}/{name}" in stored for name in weight.names),
            )
            stored.fill(self._optimizer_tensors())
            self.residency.changed()
        else:
            manager.take_pushed()
        if merges:
            manager.rows_changed()  # and gathered by whoever reads them next
        if schedule:
            manager.schedule_steps = stored.said["schedule_steps"]

    def save_checkpoint(self, save_path: str | Path, step: int = 0) -> None:
        """Writes the weights, their average, optimizer state and schedule to
        `save_path`/step_<step>; every process writes its own shard.
        """
        self._checkpoints(save_path).save({}, step=step)

    def load_checkpoint(self, load_path: str | Path) -> None:
        """Resumes from the latest checkpoint in `load_path`, whichever parallel layout wrote it.
        Raises CheckpointError if there is none.
        """
        if self._checkpoints(load_path).resume() is None:
            raise CheckpointError(
                f"{load_path} holds no checkpoint of a run. Give the folder that save_checkpoint was given."
            )

    def _checkpoints(self, folder: str | Path) -> TrainingCheckpoints:
        role = "critic" if self.classifier else "policy"
        return TrainingCheckpoints(Path(folder), {role: self}, self.manager.cfg)

    def random_state(self) -> dict[str, Any]:
        """Returns the random state of the adapters' dropout; empty without such dropout."""
        dropped = self.manager.dropped
        return {} if dropped is None else {"dropped": as_text(dropped.state)}

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Restores the random state of the adapters' dropout that `random_state` returned."""
        if self.manager.dropped is not None and "dropped" in state:
            self.manager.dropped.state = as_bytes(state["dropped"])
