"""MegatronModelManager: builds and wraps this process's part of a model, with its optimizer and
learning-rate schedule.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import tee
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from rftmega.backends.megatron import forward
from rftmega.backends.megatron.adapters import (
    Adapters,
    Replicas,
    compare_copies,
    counted_once,
    pack_base,
)
from rftmega.backends.megatron.binding import Bound, bind
from rftmega.backends.megatron.load import (
    HEAD,
    HEADS,
    load_hf,
    refuse_another_head,
    refuse_non_finite,
    refuse_strangers,
)
from rftmega.backends.megatron.sharded import load_distributed, pieces_of
from rftmega.backends.optimizers import offload
from rftmega.backends.optimizers.build import build_optimizer
from rftmega.backends.runner.gradient_check import ActiveAdapters
from rftmega.checkpoints import frozen_weights
from rftmega.checkpoints.reader import is_distributed, read_manifest
from rftmega.config import RunConfig
from rftmega.converters import Rule, table
from rftmega.converters.adapters import adapted_layers
from rftmega.converters.decoder import is_of_value_head
from rftmega.core.errors import ConfigError
from rftmega.core.media_positions import PlacedImage, RowImages, images_of
from rftmega.core.shards import Shard
from rftmega.core.waveform_positions import PlacedWaveform
from rftmega.data.media.audio_processor import AudioProcessor
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.model_providers.builder import build_chunk, transformer_config
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.tower import VisionTower
from rftmega.model_providers.value_head import ValueHead
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.models.hf.peft_folder import PEFTFolder, beginning
from rftmega.models.hf.stacked_files import open_folder
from rftmega.models.kernels.packed_weights import PackedWeight
from rftmega.models.layers.shared_base import share_base
from rftmega.runtime import device
from rftmega.runtime.device.megatron_timers import Timers
from rftmega.runtime.device.residency import Loan, Residency
from rftmega.runtime.device.spans import span
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.runtime.parallel.layout import copies
from rftmega.runtime.parallel.topology import Topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def refuse_hazards(config: TransformerConfig) -> None:
    """Raises ConfigError for settings with which Megatron-Core 0.16 silently computes wrong
    results.
    """
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    hazards = {
        "batch_p2p_comm=True with interleaving: both neighbours of two stages are one process, and messages are mixed up; "
        "gradients are wrong. Use overlap_p2p_comm=True, batch_p2p_comm=False.": interleaved
        and config.batch_p2p_comm,
        "calculate_per_token_loss=False divides the loss by the number of micro-batches, which is no algorithm. "
        "Set it to True.": not config.calculate_per_token_loss,
        "variable_seq_lengths=False with stages: packed micro-batches differ in length, and a stage would receive them in the "
        "shape of another. Set it to True.": config.pipeline_model_parallel_size > 1
        and not config.variable_seq_lengths,
    }
    if found := [text for text, present in hazards.items() if present]:
        raise ConfigError.listing("Megatron's config would train something else", found)


class MegatronModelManager:
    """MegatronModelManager holds this process's pipeline chunks of a model that is loaded from a
    Hugging Face folder, and its optimizer.
    `chunks` are the unwrapped chunks, one per virtual stage; `model` are the same chunks, wrapped
    for data parallelism by `setup_model_and_optimizer`.
    """

    custom_forward = staticmethod(forward.custom_forward)

    def __init__(
        self,
        cfg: RunConfig,
        placement: Topology,
        *,
        value_model: bool = False,
        base: "MegatronModelManager | None" = None,
    ):
        """Builds `cfg.model` in the layout of `placement` (that of `cfg.parallel`) and loads its
        weights.
        `value_model`: a value head replaces the LM head. `base`: the manager of a model with
        adapters of the same folder and layout, whose frozen weights are shared in the same memory,
        and moved between device and host by `base` alone. Raises CheckpointError if the folder's
        config or weights can't be used.
        """
        self.cfg = cfg
        self.topology = placement
        self.value_model = value_model
        self.where = device.current().here()
        self.hf_config = read_hf_config(cfg.model.path)
        self.description = describe(self.hf_config)
        self.dtype = DTYPES.get(cfg.model.dtype, device.current().train_dtype)
        self.config = transformer_config(
            self.description, cfg.parallel, self.dtype, dropout=cfg.model.dropout, fp8=cfg.model.fp8
        )
        refuse_hazards(self.config)
        self.config.timers = Timers()
        distributed = is_distributed(cfg.model.path)
        files = None if distributed else open_folder(cfg.model.path, self.hf_config)
        self._head_bias = (
            "score.bias" in files if files else read_manifest(Path(cfg.model.path))["head_bias"]
        )
        chunks = cfg.parallel.virtual_pipeline
        rules = table(self.hf_config, value_head=value_model)
        lora = cfg.model.lora
        self._adapted = (
            adapted_layers(rules, rank=lora.rank, targets=lora.targets) if lora.rank else []
        )
        with placement.active():
            self.chunks: list[GPTModel] = [
                self.model_provider_func(
                    placement.is_first_stage and chunk == 0,
                    placement.is_last_stage and chunk == chunks - 1,
                    chunk if chunks > 1 else None,
                ).to(self.where)
                for chunk in range(chunks)
            ]
        borrowed = share_base(self.chunks, base.chunks) if base else []
        loan = Loan(base.residency, borrowed) if base else None
        with loan.lender.brought(borrowed) if loan else nullcontext():
            self._fill(files, rules, borrowed)
        self.model: list[Any] = list(self.chunks)  # wrapped by setup_model_and_optimizer
        self.optimizer: Any = None
        # the parameter gather is left to the next forward pass (optimizer.overlap_param_gather)
        self._gather_is_due = False
        self._reached = ActiveAdapters()
        self.residency: Residency = Residency(
            lambda: offload.parts_of(self.model, self.optimizer, borrowed),
            finish=self.finish_param_sync,
            loan=loan,
        )
        self.residency.keep_packed(self._packed)

    def _fill(
        self, files: HFFolder | None, rules: Sequence[Rule], borrowed: Sequence[Tensor]
    ) -> None:
        """Assigns conversion rules to the weights, loads the weights except `borrowed` ones, and
        adds adapters if they are configured.

        `files`: the Hugging Face folder; None if the weights are in a distributed checkpoint.
        """
        experts = self.description.experts.number if self.description.experts else 0
        self.bound: list[Bound] = bind(self.chunks, rules, self.topology, experts=experts)
        there = {id(tensor) for tensor in borrowed}
        missing = [item for item in self.bound if id(item.parameter) not in there]
        if files is None:
            with self.topology.active():
                load_distributed(self.chunks, Path(self.cfg.model.path), self.bound)
        else:
            self._load(files, rules, experts, missing)
        refuse_non_finite(self.cfg.model.path, self.bound)
        with self.topology.active():
            pieces, _ = pieces_of(self.chunks, self.bound)
        # of each trained tensor: this process's indices among equal holders
        self.replicas: Sequence[Replicas] = [[piece.replica for piece in found] for found in pieces]
        self.trained: Sequence[Bound] = self.bound
        self.head: list[Bound] = []  # value head of a model with adapters: trained in full
        self.adapters: Adapters | None = None
        self._packed: list[PackedWeight] = []
        if self._adapted:
            if self.cfg.model.lora.base_on_host == "int8":
                self._packed = pack_base(missing)
            self._adapt()

    def lends_to(self, cfg: RunConfig) -> "MegatronModelManager | None":
        """Returns this manager if a value model of `cfg` can share its frozen weights, otherwise
        None.
        Both models must have adapters and the same folder, layout and dtype.
        """
        own = self.cfg
        alike = (cfg.model.path, cfg.model.dtype, cfg.parallel) == (
            own.model.path,
            own.model.dtype,
            own.parallel,
        )
        return self if alike and cfg.model.lora.rank and self.adapters is not None else None

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self.cfg.model.path)

    @cached_property
    def _audio_processor(self) -> AudioProcessor:
        return AudioProcessor(self.cfg.model.path)

    def pixels(self, image: PlacedImage) -> Tensor:
        """Returns the patches [P, C] of an image or video, as inputs of the vision encoder.
        Raises DataError if its file has changed or can no longer be read.
        """
        return self._processor.pixels(image)

    def frames(self, waveform: PlacedWaveform) -> Tensor:
        """Returns the frames [M, T] of a waveform, as inputs of the audio encoder.

        Raises DataError if its file has changed or can no longer be read.
        """
        return self._audio_processor.frames(waveform.source, waveform.digest)

    def read_ahead(self, batches: Iterable[RowImages | None]) -> None:
        """Starts to read the images of the next micro-batches in the background, if this process
        runs the vision encoder; `batches` holds the images of each micro-batch's rows, or None.
        """
        sees = isinstance(self.description.tower, VisionTower)
        if sees and any(chunk.pre_process for chunk in self.chunks):
            held = [images_of(batch.distinct.values()) for batch in batches if batch is not None]
            self._processor.read_ahead(image for batch in held for image in batch)

    def weights(self) -> list[Tensor]:
        """Returns this process's trained weights, detached, in the order of `trained`."""
        return [item.parameter.detach() for item in self.trained]

    def shards(self) -> list[Shard]:
        """Returns this process's shards of the model's exported weights; adapter deltas are merged
        when a shard is read.
        """
        if self.adapters is None:
            return self.frozen_shards()
        return [self.adapters.merged(item) for item in self.bound if item.rule.exported]

    def sum_of_weights(self) -> int:
        """Returns a checksum of the model's weights (without adapters), which is the same in every
        parallel layout; a collective.
        """
        held = zip(self.bound, self.replicas, strict=True)
        return frozen_weights.sum_of(counted_once(list(held)), self.where)

    def frozen_shards(self) -> list[Shard]:
        """Returns this process's shards of the model's exported weights, without adapter deltas."""
        return [item.shard() for item in self.bound if item.rule.exported]

    def _adapt(self) -> None:
        """Freezes the model and adds adapters; only the adapters and a value head are trained.
        Called before the chunks are wrapped, so that frozen weights get no gradient buffers and
        optimizer states.
        """
        lora = self.cfg.model.lora
        held = list(zip(self.bound, self.replicas, strict=True))
        base = [pair for pair in held if not is_of_value_head(pair[0].rule)]
        head = [pair for pair in held if is_of_value_head(pair[0].rule)]
        once = list(counted_once(base))
        self.sum_of_base = frozen_weights.sum_of(once, self.where)
        self.base_dtypes = frozen_weights.dtypes_beside(self.config.params_dtype, once)
        self.adapters = Adapters(self.chunks, base, self._adapted, self.topology, lora)
        self.head = [item for item, _ in head]
        for item in self.head:
            item.parameter.requires_grad_()
        self.trained = [*self.adapters.bound, *self.head]
        self.replicas = [*self.adapters.replicas, *(pieces for _, pieces in head)]
        if lora.path:
            folder = PEFTFolder(lora.path, option="model.lora.path")
            folder.check(lora, self.adapters.targets)
            self.adapters.load(folder.whole)
            for item, _ in base:
                compare_copies(item, folder)
            folder.refuse_rest(gather_objects(folder.looked_at))
        else:
            self.adapters.load(beginning(self.cfg.trainer.seed))

    def _load(
        self, files: HFFolder, rules: Sequence[Rule], experts: int, missing: Sequence[Bound]
    ) -> None:
        tied = self.description.tied
        allowed = HEADS if self.value_model else frozenset({HEAD} if tied else ())
        refuse_strangers(files, rules, self.hf_config, experts=experts, allowed=allowed)
        load_hf(files, missing)
        if tied and not self.value_model:
            refuse_another_head(files, self.bound)

    def model_provider_func(
        self, pre_process: bool, post_process: bool, chunk: int | None = None
    ) -> GPTModel:
        """Builds one pipeline chunk, randomly initialised; a subclass may override it to build
        another model.
        `pre_process`, `post_process`: whether the chunk has the embedding, and the LM head or value
        head; `chunk`: index of the virtual stage, None without virtual stages.
        """
        built = build_chunk(
            self.description,
            self.config,
            pre_process=pre_process,
            post_process=post_process,
            chunk=chunk,
            head=not self.value_model,
            freeze_vision=self.cfg.model.freeze_vision,
            adapters=bool(self._adapted),
        )
        if post_process and self.value_model:
            built.value_head = ValueHead(self.config, bias=self._head_bias)
        return built

    def setup_model_and_optimizer(
        self, model_type: ModelType = ModelType.encoder_or_decoder
    ) -> None:
        """Wraps the chunks for data parallelism and builds the optimizer and the learning-rate
        schedule.
        Raises ValueError for a `model_type` other than encoder_or_decoder, which is Megatron's type
        of decoders.
        """
        if model_type != ModelType.encoder_or_decoder:
            raise ValueError(
                f"model_type={model_type} is not supported: only ModelType.encoder_or_decoder is built here."
            )
        with self.topology.active():
            self.model = [self._wrap(chunk, number) for number, chunk in enumerate(self.chunks)]
            self.optimizer = self._build_optimizer()
        self.lr_scheduler = self._build_scheduler()
        # optimizer step k uses step k of the schedule, so that a warm-up does not start at a
        # learning rate of 0
        self.lr_scheduler.step(1)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.cfg.optimizer.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _wrap(self, chunk: GPTModel, number: int) -> DistributedDataParallel:
        optimizer = self.cfg.optimizer
        # Megatron reduces experts' gradients over the dense data-parallel group unless experts are
        # distributed over processes. That group lacks the tensor-parallel ranks, which hold whole
        # experts and see other tokens if expert_tensor is smaller.
        for name, parameter in chunk.named_parameters():
            if ".experts." in name and self.cfg.parallel.expert_tensor != self.cfg.parallel.tensor:
                parameter.allreduce = False
        shards = self._shards_optimizer()
        data_parallel = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=shards,
            overlap_grad_reduce=optimizer.overlap_grad_reduce,
            overlap_param_gather=optimizer.overlap_param_gather and shards,
            check_for_nan_in_grad=False,
        )
        # Later chunks' communication is off the critical path, so it need not be split into buckets.
        return DistributedDataParallel(
            self.config, data_parallel, chunk, disable_bucketing=number > 0
        )

    def _shards_optimizer(self) -> bool:
        """Returns whether the optimizer states are sharded over the processes that hold the same
        parameters.
        """
        sizes, experts = self.topology, self.description.experts is not None
        world = sizes.tensor * sizes.context * sizes.pipeline * sizes.data
        return self.cfg.optimizer.shards_states(
            max(copies(world, self.cfg.parallel, experts=experts))
        )

    def _build_optimizer(self) -> Any:
        return build_optimizer(
            self.cfg.optimizer,
            self.model,
            self.config,
            shards=self._shards_optimizer(),
            overrides=self._tower_s_rate(),
        )

    def _tower_s_rate(self) -> dict[ParamKey, Any] | None:
        """Returns Megatron's overrides of learning rate and weight decay, with the learning rate
        for vision and audio encoders; None to use Megatron's defaults.
        """
        optimizer = self.cfg.optimizer
        if not optimizer.vision_learning_rate:
            return None
        share = optimizer.vision_learning_rate / optimizer.learning_rate
        rates: Any = {
            "max_lr": optimizer.vision_learning_rate,
            "min_lr": optimizer.min_learning_rate * share,
        }
        usual = get_standard_config_overrides(MegatronOptimizerConfig())
        return {**usual, ParamKey(name=("*visual.*", "*.audio.*")): rates}

    def _build_scheduler(self) -> OptimizerParamScheduler:
        optimizer = self.cfg.optimizer
        frozen = 0 if self.value_model else self.cfg.critic.warmup_steps
        optimizer_steps = (self.cfg.trainer.steps - frozen) * self.cfg.algorithm.steps_per_rollout
        # Always with the scheduler: norms are exempted from weight decay only through its step.
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.learning_rate,
            min_lr=optimizer.min_learning_rate,
            lr_warmup_steps=optimizer.warmup_steps,
            lr_decay_steps=optimizer_steps + 1,  # the step after the last has the minimum
            lr_decay_style=optimizer.schedule,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def train(self, learning: bool) -> None:
        """Switches the model to training (`learning`), where dropout may apply, or to scoring."""
        for chunk in self.model:
            chunk.train(learning)

    def zero_grad(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def why_no_backward(self) -> str:
        """Returns why only Megatron's schedule can run this model's backward pass; "" if `backward`
        can.
        """
        if self.cfg.parallel.pipeline > 1:
            return (
                f"with parallel.pipeline={self.cfg.parallel.pipeline} the schedule runs forward and backward passes of all "
                "stages and micro-batches together. Call policy.step(experience, loss_fn), or set parallel.pipeline=1."
            )
        if self.cfg.optimizer.overlap_grad_reduce:
            return (
                "optimizer.overlap_grad_reduce=true exchanges gradients in the first backward pass of a step. Set it to false, "
                "or call policy.step(experience, loss_fn)."
            )
        return ""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss that was computed from `ModelRunner.forward`."""
        with self.topology.active():
            loss.backward()

    def average_gradients(self) -> None:
        """Averages the gradients that `backward` added over the processes that computed different
        rows.
        """
        with self.topology.active():
            finalize_model_grads(self.model)
            for chunk in self.model:
                chunk.scale_gradients(1 / self.topology.data)

    def take_step(self) -> tuple[bool, float]:
        """Clips the gradients, takes an optimizer step and advances the schedule; returns (whether
        the step was taken, global gradient norm before clipping).
        If the norm is not finite, no process takes the step: weights, optimizer state and schedule
        stay as they are, and the returned norm is NaN. (Megatron itself checks this in fp16 only.)
        """
        taken, grad_norm = False, math.nan
        with span("optimizer step"), self.topology.active():
            if not self.optimizer.prepare_grads():
                grad_norm = float(self.optimizer.get_grad_norm())
                if math.isfinite(grad_norm):
                    self._clip(grad_norm)
                    self.residency.settle()
                    self.optimizer.step_with_ready_grads()
                    self._gather_is_due = True
                    self.residency.changed()
                    self.lr_scheduler.step(1)
                    taken = True
            # main parameters have gradients of their own, which are not needed any more
            self.optimizer.zero_grad()
        return taken, grad_norm if taken else math.nan

    def refuse_lost_gradient(self) -> None:
        """Raises NothingTrained, on every process, if the adapters of a value model get no gradient
        although its value head gets one (see `ActiveAdapters`).

        The check is a collective. It ends with the first step in which the adapters have a
        gradient; models without adapters and policies are not checked.
        """
        if self.adapters is None or not self.value_model or self._reached.seen:
            return
        weights = [item for item in self.head if item.parameter.dim() > 1 and item.parameter.any()]
        self._reached.refuse_lost(_gradients(self.adapters.bound), _gradients(weights))

    def _clip(self, grad_norm: float) -> None:
        if not self.cfg.optimizer.clip_grad:
            return
        for inner in offload.inner_optimizers(self.optimizer):
            if parameters := inner.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=self.cfg.optimizer.clip_grad, total_norm=grad_norm
                )

    def finish_param_sync(self) -> None:
        """Gathers the parameters that the distributed optimizer updated, if that was left to the
        next forward pass.
        To be called before the parameters are read elsewhere.
        """
        if self.cfg.optimizer.overlap_param_gather and self._gather_is_due:
            self._gather_is_due = False
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
            self.residency.changed()

    def weights_changed(self) -> None:
        """Updates the optimizer's main parameters after code other than the optimizer changed the
        parameters.
        """
        self.residency.changed()
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    @property
    def learning_rate(self) -> float:
        """Returns the learning rate of the next optimizer step."""
        groups = self.optimizer.param_groups
        rate: float = next(group["lr"] for group in groups if group["default_config"])
        return rate

    @staticmethod
    def make_data_iterator_list(
        data_iterator: Iterator[Any], padding: bool = False, vpp_size: int = 1
    ) -> list[Iterator[Any]]:
        """Returns `vpp_size` iterators over the same micro-batches, one per model chunk: with
        interleaving, each chunk runs all micro-batches.
        With `padding`, micro-batches are dicts of tensors, and two-dimensional tensors are padded
        with zeros to the longest of all micro-batches. (A schedule without interleaving takes one
        iterator instead of a list.)
        """
        if padding:
            batches = list(data_iterator)
            longest = max(
                (x.shape[1] for batch in batches for x in batch.values() if x.dim() == 2), default=0
            )
            data_iterator = iter(
                {
                    name: F.pad(x, (0, longest - x.shape[1])) if x.dim() == 2 else x
                    for name, x in batch.items()
                }
                for batch in batches
            )
        return list(tee(data_iterator, vpp_size))

    def run_schedule(
        self, forward_step: Callable[..., Any], micro_batches: Iterable[Any], *, forward_only: bool
    ) -> list[Any]:
        """Runs the pipeline schedule over `micro_batches`: forward passes and, unless
        `forward_only`, backward passes.
        `forward_step(iterator, chunk)` returns (output, a function that the last stage applies to
        the output). Returns that function's results, in order, on the last stage, and [] on the
        other stages.
        """
        batches = list(micro_batches)
        several = len(self.model) > 1
        iterators = self.make_data_iterator_list(iter(batches), vpp_size=len(self.model))
        with self.topology.active():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if several else iterators[0],
                model=self.model if several else self.model[0],
                num_microbatches=len(batches),
                seq_length=1,  # ignored: the stages exchange the shape of each micro-batch
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def offload_megatron_copy_params(self, optimizers: Any) -> None:
        """Moves the fp32 main parameters (Megatron's "copy" parameters) of one or more Megatron
        optimizers to the host.
        """
        self.residency.off_tensors(offload.main_parameters(optimizers))

    def load_megatron_copy_params(self, optimizers: Any) -> None:
        """Moves the fp32 main parameters of one or more Megatron optimizers back to the device."""
        self.residency.on_tensors(offload.main_parameters(optimizers))


def _gradients(bound: Iterable[Bound]) -> Iterator[Tensor]:
    parameters: list[Any] = [item.parameter for item in bound]
    return (parameter.main_grad for parameter in parameters)
