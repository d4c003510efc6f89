"""MegatronModelManager: builds this process's part of a model, wraps it, and owns its optimizer and schedule."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from converters import table
from model_providers.builder import build_chunk, transformer_config
from model_providers.description import describe, read_hf_config
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.megatron.binding import Bound, bind
from rftmega.megatron.load import load_hf
from rftmega.parallel.topology import Topology


class MegatronModelManager:
    """This process's chunks of one model, with Hugging Face weights, ready to be run and stepped."""

    def __init__(
        self,
        hf_folder: str | Path,
        parallel: ParallelConfig,
        topology: Topology,
        *,
        dtype: torch.dtype,
        where: torch.device,
    ):
        """Builds and loads the model. Raises CheckpointError where the folder's config or weights can't serve."""
        self.topology = topology
        self.where = where
        self.hf_config = read_hf_config(hf_folder)
        self.description = describe(self.hf_config)
        self.config = transformer_config(self.description, parallel, dtype)
        self.chunks: list[GPTModel] = [
            build_chunk(
                self.description, self.config, pre_process=topology.is_first_stage, post_process=topology.is_last_stage
            ).to(where)
        ]
        self.bound: list[Bound] = bind(self.chunks, table(self.hf_config))
        load_hf(hf_folder, self.bound, rank=topology.tensor_rank, ranks=topology.tensor)
        self.model: list[Any] = list(self.chunks)  # wrapped by setup_model_and_optimizer

    def setup_model_and_optimizer(self, optimizer: OptimizerConfig, *, optimizer_steps: int) -> None:
        """Wraps the chunks for data parallelism and builds optimizer and learning-rate schedule over `optimizer_steps`."""
        data_parallel = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=optimizer.distributed, check_for_nan_in_grad=False
        )
        self.model = [DistributedDataParallel(self.config, data_parallel, chunk) for chunk in self.chunks]
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=optimizer.learning_rate,
                min_lr=optimizer.min_learning_rate,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.beta1,
                adam_beta2=optimizer.beta2,
                adam_eps=optimizer.epsilon,
                clip_grad=optimizer.clip_grad,
                bf16=self.config.bf16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=optimizer.distributed,
            ),
            self.model,
        )
        # Never without the scheduler: the exemption of norms from weight decay acts only through its step.
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.learning_rate,
            min_lr=optimizer.min_learning_rate,
            lr_warmup_steps=optimizer.warmup_steps,
            lr_decay_steps=optimizer_steps + 1,  # the minimum is where the schedule would go next
            lr_decay_style=optimizer.schedule,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self.scheduler.step(1)  # optimizer step k runs at the schedule's k, so that a warm-up does not start with a step of 0
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    def zero_grad(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> tuple[bool, float]:
        """Clips, steps and advances the schedule; (was a step taken?, global gradient norm before clipping).

        Gradients that are not finite are refused, on all processes alike, since the norm is global: weights, optimizer
        state and schedule stay as they are. (Megatron itself looks for them in fp16 only.)
        """
        if not self.optimizer.prepare_grads():
            grad_norm = float(self.optimizer.get_grad_norm())
            if math.isfinite(grad_norm):
                self.optimizer.step()
                self.scheduler.step(1)
                return True, grad_norm
        return False, math.nan

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return self.optimizer.param_groups[0]["lr"]


class ReferenceWeights:
    """A second set of weights, kept on the host and swapped into the one resident model."""

    def __init__(self, manager: MegatronModelManager):
        """Takes the present weights as the reference."""
        self.manager = manager
        self._held: list[Tensor] = [item.parameter.detach().to("cpu", copy=True) for item in manager.bound]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within, the model computes with the reference; afterwards with its own weights, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for item, held in zip(self.manager.bound, self._held, strict=True):
            mine = item.parameter.detach().to("cpu", copy=True)
            item.parameter.copy_(held)  # in place: gradient and parameter buffers alias this storage
            held.copy_(mine)
