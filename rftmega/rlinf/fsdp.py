"""RLinf's FSDPModelManager and its FSDP actor, on top of rftmega's FSDP2 backend."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from rftmega.backends.fsdp import actor as backend
from rftmega.backends.fsdp import manager
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.sharding import local, sharded_modules
from rftmega.backends.fsdp.trainable import FSDPModel
from rftmega.config import RunConfig
from rftmega.rlinf.actor import ReinforcedActor
from rftmega.runtime import device
from rftmega.weights import Exporter


class FSDPModelManager(manager.FSDPModelManager):
    """FSDPModelManager owns this process's shard of a model with its optimizer, learning-rate
    scheduler and gradient scaler. A loop that calls `before_micro_batch`, `loss.backward()` and
    `optimizer_step` trains on the mean of all processes' gradients.
    """

    def __init__(self, cfg: RunConfig, world_size: int, rank: int) -> None:
        """Builds the model of `cfg` and loads its weights; the process group must exist. Raises
        ValueError if `world_size` and `rank` are not the process group's.
        """
        there = (dist.get_world_size(), dist.get_rank())
        if (world_size, rank) != there:
            raise ValueError(
                f"world_size={world_size}, rank={rank}, but the process group says world_size={there[0]}, rank={there[1]}. "
                "FSDP shards over all processes."
            )
        super().__init__(cfg, ShardingMesh.create(cfg.parallel))

    def setup_model_and_optimizer(self) -> None:
        """Builds `optimizer`, `lr_scheduler` and `grad_scaler`. The gradient scaler is disabled: the
        model computes in float32 or bfloat16, whose gradients need no scale.
        """
        super().setup_model_and_optimizer()
        self.grad_scaler = self.build_grad_scaler(False)

    def build_optimizer(
        self, model: nn.Module, enable_critic_warmup: bool = False
    ) -> torch.optim.Optimizer:
        """Returns an AdamW optimizer with the options optimizer.* over this process's rows of
        `model`, which is `self.model` or `self.network`.

        Raises ValueError for another model, and for `enable_critic_warmup`: a policy has no value
        head here, and critic.warmup_steps trains the critic alone first.
        """
        self._refuse_another(model)
        if enable_critic_warmup:
            raise ValueError(
                "enable_critic_warmup: this policy has no value head, since the critic is a model of its own. Set "
                "critic.warmup_steps, the number of steps in which the critic learns alone."
            )
        return self.adamw()

    def build_grad_scaler(self, enabled: bool, **kwargs: Any) -> ShardedGradScaler:
        """Returns a gradient scaler for the losses of this process's device. Without `enabled` it
        scales by 1. To use one, assign it to `grad_scaler` and scale each loss with it;
        `optimizer_step` then removes the scale. `kwargs`: arguments of torch's ShardedGradScaler.
        """
        return ShardedGradScaler(device.current().type, enabled=enabled, **kwargs)

    def get_model_state_dict(self, cpu_offload: bool, full_state_dict: bool) -> dict[str, Tensor]:
        """Returns the model's weights under transformers' names; a collective.

        `full_state_dict`: whole tensors in the forward pass's dtype, as an export contains them
        (adapters are merged); with `cpu_offload` on the first process alone, whose host holds them.
        Otherwise this process's rows of each parameter: with `cpu_offload` a copy on the host,
        without it the rows themselves, which training changes.
        """
        self.finish_param_sync()
        if not full_state_dict:
            held = {weight.name: weight.pushed for weight in self.weights_held}
            return (
                {name: x.to("cpu", copy=True) for name, x in held.items()} if cpu_offload else held
            )
        bucket = self.cfg.trainer.push_bucket_mib * 2**20
        tensors = iter(Exporter(self.shards(), self.placement.replica_group, bucket_bytes=bucket))
        if not cpu_offload:
            return {name: x.clone() for name, x in tensors}
        first = dist.get_rank() == 0
        return {name: x.to("cpu", copy=True) for name, x in tensors if first}

    def save_checkpoint(self, save_path: str | Path, step: int = 0) -> None:
        """Saves weights, optimizer state and schedule as `save_path`/step_<step>; every process
        writes its own shard, from the device or the host.
        """
        FSDPModel(self, self.placement).save_checkpoint(save_path, step)

    def load_checkpoint(self, load_path: str | Path) -> None:
        """Loads the latest checkpoint in `load_path`, whichever layout wrote it; every process reads
        its own shard. Raises CheckpointError if there is none.
        """
        FSDPModel(self, self.placement).load_checkpoint(load_path)

    def load_param_and_grad(self, device_id: Any = None, load_grad: bool = False) -> None:
        """Moves this process's rows of the parameters back to its device and, with `load_grad`, of
        the gradients. Raises ValueError if `device_id` is another device; None: its own.
        """
        self._refuse_another_device(device_id)
        super().load_param_and_grad(load_grad=load_grad)

    def load_optimizer(self, device_id: Any = None) -> None:
        """Moves Adam's moments back to this process's device. Raises ValueError if `device_id` is
        another device; None: its own.
        """
        self._refuse_another_device(device_id)
        super().load_optimizer()

    def optimizer_step(self) -> tuple[float, list[float]]:
        """Divides the gradients by the number of processes that compute different rows, removes the
        gradient scale, clips, takes an optimizer step and advances the schedule.

        Returns the global gradient norm before clipping and the step's learning rate of each
        parameter group. If the norm is not finite, nothing is changed and the norm is NaN.
        """
        assert self.optimizer is not None, "call setup_model_and_optimizer first"
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.average_gradients()
        scaled = self.grad_scaler.is_enabled()
        if scaled:
            self._unscale(self.optimizer)
        _, grad_norm = self.take_step()
        if scaled:
            self.grad_scaler.update()
        return grad_norm, rates

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        for weight in self.trained:  # the optimizer steps the rows, whose gradients are the shards'
            gradient = weight.parameter.grad
            weight.rows.grad = None if gradient is None else local(gradient)
        self.grad_scaler.unscale_(optimizer)
        for weight in self.trained:
            weight.rows.grad = None

    def before_micro_batch(
        self, model: nn.Module, is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Prepares `model` for a micro-batch and returns a context in which to run it.

        Gradients are exchanged in the backward pass of the last micro-batch only; until then each
        process accumulates whole gradients, which takes the memory of the parameters.
        """
        context = super().before_micro_batch(model, True)
        for module in sharded_modules(model):
            module.set_requires_gradient_sync(is_last_micro_batch, recurse=False)
        return context

    def _refuse_another(self, model: nn.Module) -> None:
        if model is not self.model and model is not self.network:
            raise ValueError(
                f"{type(model).__name__} is not this manager's model, which it has built. Give manager.model."
            )

    def _refuse_another_device(self, device_id: Any) -> None:
        if device_id is None:
            return
        kind = self.where.type
        given = torch.device(kind, device_id) if isinstance(device_id, int) else device_id
        given = torch.device(given)
        if given.type != kind or given.index not in (None, self.where.index or 0):
            raise ValueError(
                f"device_id={device_id!r}, but this process computes on {self.where}. The launcher's LOCAL_RANK decides the "
                "device."
            )


class FSDPActor(FSDPModelManager, ReinforcedActor):
    """FSDPActor is a policy with sharded parameters, which the calls of ReinforcedActor train."""

    def __init__(self, cfg: RunConfig) -> None:
        """Stores the config; `init_worker` builds the models and the engine."""
        self.prepare(cfg)

    def build_policy(self) -> backend.FSDPActor:
        FSDPModelManager.__init__(self, self.cfg, dist.get_world_size(), dist.get_rank())
        return backend.FSDPActor(self.cfg, self.placement, manager=self)


EmbodiedFSDPActor = FSDPActor  # RLinf's name; the policy is a language model here
