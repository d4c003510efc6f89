"""FSDPModelManager builds this process's shard of a model, with its optimizer and learning-rate
schedule.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from rftmega.backends.decoder.describe import tower_of
from rftmega.backends.decoder.meta_decoder import describe, state_buffers
from rftmega.backends.decoder.parameter_places import (
    Placed,
    buffer_dtype,
    differs_from,
    plan_of_buffer,
    plans_of,
    read,
)
from rftmega.backends.decoder.tensor_plan import Split, partial_of, splits_of, styles_of
from rftmega.backends.fsdp.adapters import ShardedAdapters, compare_copies
from rftmega.backends.fsdp.expert_rows import make_experts_fit
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.module import (
    OTHER_HEAD,
    VALUE_BIAS,
    Built,
    meta_model,
    opened,
    places_in,
    unusable,
    with_head,
)
from rftmega.backends.fsdp.parameter_rows import Weight
from rftmega.backends.fsdp.sharding import local, materialise, shard_parameters, sharded_modules
from rftmega.backends.fsdp.tensor_parallel import share_layers
from rftmega.backends.runner.gradient_check import ActiveAdapters
from rftmega.backends.runner.learning_rate import learning_rate
from rftmega.checkpoints import frozen_weights
from rftmega.config import OptimizerConfig, RunConfig
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.core.media_positions import PlacedImage, RowImages, images_of
from rftmega.core.shards import Shard
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.model_providers.output_head import names_of_head
from rftmega.model_providers.training_mode import allow_recomputation, learn
from rftmega.models.hf.hf_folder import HFFolder, is_finite
from rftmega.models.hf.peft_folder import PEFTFolder, beginning
from rftmega.runtime import device
from rftmega.runtime.device.random_stream import RandomStream
from rftmega.runtime.device.residency import ADAM, GRADIENTS, MAIN_PARAMETERS, PARAMETERS, Residency
from rftmega.runtime.device.spans import span
from rftmega.runtime.parallel.collectives import gather_objects

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIRST, SECOND = MOMENTS = "exp_avg", "exp_avg_sq"


class FSDPModelManager:
    """FSDPModelManager holds this process's shard of a model that is loaded from a Hugging Face
    folder, and its optimizer.
    """

    def __init__(self, cfg: RunConfig, placement: ShardingMesh, *, value_model: bool = False):
        """Builds `cfg.model` sharded over the processes of `placement`, and loads its weights.
        `value_model`: a value head replaces the LM head. Raises CheckpointError if the folder's
        config or weights can't be used.
        """
        self.cfg, self.placement, self.value_model = cfg, placement, value_model
        self.where = device.current().here()
        self.dtype = DTYPES.get(cfg.model.dtype, device.current().train_dtype)
        path = cfg.model.path
        self.hf_config = read_json_object(Path(path) / "config.json")
        files = opened(path, self.hf_config)
        self.unpacked: str | None = None  # why rows are padded; None: they are packed
        built = with_head(
            self.model_provider_func(),
            self.unpacked,
            path,
            value_model=value_model,
            head_bias=VALUE_BIAS in files,
        )
        self.network, self.model = built.network, built.model
        self.description = describe(self.model, tower_of(path, self.model.config))
        places = self._places(files, built)
        names = built.names
        self.adapters: ShardedAdapters | None = None
        if cfg.model.lora.rank:
            self.adapters = ShardedAdapters(self.network, self.model, cfg.model.lora, placement)
            places |= self.adapters.places(places)
            names = names | self.adapters.named(names)
        self._splits: dict[str, Split] = {}
        self._partial: set[str] = set()
        if placement.tensor > 1:
            self._share_layers()
        make_experts_fit(self.model, self.dtype, placement.tensor)
        if cfg.parallel.recompute == "full":
            allow_recomputation(self.model)
        if self.adapters is not None:
            head = self.network.head.parameters() if value_model else ()
            self.adapters.freeze(self.network, self.dtype, beside=head)
        shard_parameters(self.network, self.model, placement, cfg.parallel, self.dtype)
        home = torch.device("cpu") if self.on_host else self.where
        materialise(self.network, self.model, home)
        every = self._weights(names, places)
        # the model's weights, and the trained ones: the same, or its adapters' and a value head's
        own = set(built.names.values())
        buffers = self._buffers(files, places)
        self.weights_held = [weight for weight in every if weight.name in own] + buffers
        self.trained = [weight for weight in every if weight.learns]
        self._load(files)
        if self.adapters is not None:
            self._adapt(self.adapters)
        self.optimizer: torch.optim.AdamW | None = None
        self.lr_scheduler: LambdaLR | None = None
        self._pushed_is_old = True
        self._reached = ActiveAdapters()
        # adapter dropout; processes that compute the same rows drop the same elements
        self.dropped: RandomStream | None = None
        if self.adapters is not None and cfg.model.lora.dropout:
            self.dropped = RandomStream(cfg.trainer.seed + placement.data_rank)
        self.residency = Residency(self._parts, finish=self.finish_param_sync)

    def model_provider_func(self) -> PreTrainedModel:
        """Builds the transformers model on the meta device, without its weights, and sets
        `unpacked`; a subclass may override it to change the model's modules.
        """
        model, self.unpacked = meta_model(self.cfg.model.path)
        return model

    @property
    def on_host(self) -> bool:
        """Returns whether parameters stay on the host and are copied to the device layer by layer
        (parallel.cpu_offload).
        """
        return self.cfg.parallel.cpu_offload

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self.cfg.model.path)

    def pixels(self, image: PlacedImage) -> Tensor:
        """Returns the patches [P, C] of an image or video, as inputs of the vision encoder.
        Raises DataError if its file has changed or can no longer be read.
        """
        return self._processor.pixels(image)

    def read_ahead(self, batches: Iterable[RowImages | None]) -> None:
        """Starts to read the images of the next micro-batches in the background; `batches` holds
        the images of each micro-batch's rows, or None.
        """
        held = [images_of(batch.distinct.values()) for batch in batches if batch is not None]
        self._processor.read_ahead(image for batch in held for image in batch)

    def _places(self, files: HFFolder, built: Built) -> dict[str, list[Placed]]:
        """Returns parameter name (transformers') -> positions of the folder's tensors in the
        parameter.
        """
        found = places_in(files, built, value_model=self.value_model)
        parameters = dict(built.network.named_parameters())
        for own, name in built.names.items():
            if name not in found:  # a value model that starts from a policy has a zero value head
                shape = tuple(parameters[own].shape)
                found[name] = [Placed(name, shape, None, (0,) * len(shape))]
        return found

    def _share_layers(self) -> None:
        size, rank = self.placement.tensor, self.placement.tensor_rank
        styles = styles_of(self.model, size)
        self._splits = splits_of(self.model, styles, rank, size)
        self._partial = partial_of(self.model, styles)
        if self.adapters is not None:
            self.adapters.share(self._splits, self._partial)
        share_layers(self.network, self.model, styles, self._splits, self.placement.tensor_group)

    def _weights(self, names: dict[str, str], places: dict[str, list[Placed]]) -> list[Weight]:
        embedding = self.model.get_input_embeddings().weight
        found = []
        for name, parameter in self.network.named_parameters():
            held = local(parameter)
            first = self.placement.first_row(len(parameter))
            known, split = names[name], self._splits.get(names[name])
            plans = plans_of(
                known,
                places[known],
                (first, first + len(held)),
                self.dtype,
                split=split,
                opens=parameter is embedding,
            )
            wide = held.dtype == self.dtype
            pushed = held if wide else torch.empty_like(held, dtype=self.dtype)
            embeds, partial = parameter is embedding, known in self._partial
            found.append(Weight(known, parameter, plans, embeds, split, partial, held, pushed))
        return found

    def _buffers(self, files: HFFolder, places: dict[str, list[Placed]]) -> list[Weight]:
        """Returns the buffers that belong to the model's state, such as a router's correction bias.
        Buffers are not sharded and never trained. `buffer_dtype` says in which dtype each is
        pushed.
        """
        found = []
        for name, buffer in state_buffers(self.model).items():
            (place,) = places[name]
            dtype = buffer_dtype(files, place.name, buffer)
            plan = plan_of_buffer(place.name, place.shape, dtype)
            pushed = buffer if dtype == buffer.dtype else torch.empty_like(buffer, dtype=dtype)
            found.append(Weight(name, buffer, [plan], False, None, False, buffer, pushed, True))
        return found

    @torch.no_grad()
    def _load(self, files: HFFolder) -> None:
        """Reads this process's rows of all weights from the folder.

        Raises CheckpointError, the same on every process, for non-finite weights, and for an LM
        head that differs from the embedding that it should be tied to.
        """
        problems, head = [], names_of_head(self.model)[0]
        for weight in self.weights_held:
            shards = [plan.of(weight.rows) for plan in weight.plans]
            if all(name in files for shard in shards for name in shard.logical.names):
                read(files, shards)
            else:
                weight.rows.zero_()
            if not weight.learns and weight.pushed is not weight.rows:
                weight.pushed.copy_(weight.rows)
            if not is_finite(weight.rows):
                problems.append(f"NaN or infinite weights in {weight.name}")
            if self._ties(weight) and differs_from(files, head, shards):
                problems.append(OTHER_HEAD.format(head=head))
        found = sorted({problem for each in gather_objects(problems) for problem in each})
        if found:
            raise unusable(files, found)

    def _adapt(self, adapters: ShardedAdapters) -> None:
        """Initialises the adapters, or loads them from a PEFT folder and compares PEFT's copies of
        frozen weights with the model's.
        """
        lora = self.cfg.model.lora
        held = [weight for weight in self.weights_held if not weight.learns]
        self.sum_of_base = self._sum_of(held)
        self.base_dtypes = frozen_weights.dtypes_beside(self.dtype, self._written(held))
        adapters.bind(self.trained)
        if lora.path:
            folder = PEFTFolder(lora.path, option="model.lora.path")
            folder.check(lora, adapters.targets)
            adapters.load(folder.whole)
            for weight in held:
                compare_copies(weight, folder)
            folder.refuse_rest(gather_objects(folder.looked_at))
        else:
            adapters.load(beginning(self.cfg.trainer.seed))

    def sum_of_weights(self) -> int:
        """Returns a checksum of the model's weights (without adapters), which is the same in every
        parallel layout; a collective.
        """
        self.finish_param_sync()
        return self._sum_of(self.weights_held)

    def _sum_of(self, weights: Iterable[Weight]) -> int:
        return frozen_weights.sum_of(self._written(weights), self.where)

    def _written(self, weights: Iterable[Weight]) -> Iterator[Shard]:
        """Yields shards of `weights`, such that each element is yielded on one process only."""
        own = (each for each in weights if self.placement.writes(each.split, whole=each.whole))
        return (shard for weight in own for shard in weight.shards())

    def _ties(self, weight: Weight) -> bool:
        return weight.embeds and self.description.tied and not self.value_model

    def shards(self) -> list[Shard]:
        """Returns this process's shards of the model in the forward pass's dtype; adapter deltas
        are merged when a shard is read.
        """
        if self.adapters is None:
            return self.frozen_shards()
        return [shard for weight in self.weights_held for shard in self.adapters.merged(weight)]

    def frozen_shards(self) -> list[Shard]:
        """Returns this process's shards of the model, without adapter deltas."""
        return [shard for weight in self.weights_held for shard in weight.shards()]

    @property
    def buffers(self) -> list[Weight]:
        """Returns the buffers that belong to the model's state."""
        return [weight for weight in self.weights_held if weight.whole]

    @property
    def head(self) -> list[Weight]:
        """Returns the weights that are trained in full in addition to the adapters: those of a
        value head.
        """
        return [weight for weight in self.weights_held if self.adapters and weight.learns]

    @property
    def adam_steps(self) -> int:
        """Returns the number of optimizer steps in Adam's state; 0 if Adam has no state yet."""
        if self.optimizer is None or not self.optimizer.state:
            return 0
        return int(next(iter(self.optimizer.state.values()))["step"])

    def set_adam_steps(
        self, steps: int, holds: Callable[[Weight], bool] = lambda weight: True
    ) -> None:
        """Replaces Adam's state by zero moments with the given number of steps, to be filled
        afterwards; at 0 steps, removes the state. `holds`: whether a weight has moments; one that
        never had a gradient has none.
        """
        assert self.optimizer is not None
        self.optimizer.state.clear()
        for weight in filter(holds, self.trained if steps else ()):
            moments = {name: torch.zeros_like(weight.rows) for name in MOMENTS}
            self.optimizer.state[weight.rows] = {"step": torch.tensor(float(steps))} | moments

    def _parts(self) -> dict[str, list[Tensor]]:
        if self.on_host:
            return {PARAMETERS: [], GRADIENTS: [], MAIN_PARAMETERS: [], ADAM: []}
        frozen = [weight.rows for weight in self.weights_held if not weight.learns]
        whole = [] if self.adapters is None else self.adapters.gathered
        narrow = [weight.pushed for weight in self.trained if weight.pushed is not weight.rows]
        gradients = [weight.parameter.grad for weight in self.trained]
        state = self.optimizer.state if self.optimizer else {}
        return {
            PARAMETERS: frozen + self.weights() + narrow + whole,
            GRADIENTS: [local(gradient) for gradient in gradients if gradient is not None],
            MAIN_PARAMETERS: [],
            ADAM: [each[name] for each in state.values() for name in MOMENTS],
        }

    def weights(self) -> list[Tensor]:
        """Returns this process's rows of all trained parameters, in the optimizer's dtype."""
        return [weight.rows for weight in self.trained]

    def setup_model_and_optimizer(self) -> None:
        """Builds the optimizer and the learning-rate schedule of this process's rows."""
        self.optimizer = self.adamw()
        self.lr_scheduler = self.build_lr_scheduler(self.optimizer, self.cfg.optimizer)

    def adamw(self) -> torch.optim.AdamW:
        """Returns an AdamW optimizer (Loshchilov and Hutter, arXiv:1711.05101) of this process's
        rows.
        Norms and biases are exempt from weight decay.
        """
        chosen = self.cfg.optimizer
        decays = [weight for weight in self.trained if _decays(weight)]
        exempt = [weight for weight in self.trained if not _decays(weight)]
        groups = [
            {"params": [weight.rows for weight in decays], "weight_decay": chosen.weight_decay},
            {"params": [weight.rows for weight in exempt], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=chosen.learning_rate,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.epsilon,
        )

    def build_lr_scheduler(
        self, optimizer: torch.optim.Optimizer, optim_config: OptimizerConfig
    ) -> LambdaLR:
        """Returns the schedule of `learning_rate` for the planned steps of this model, which sets
        the learning rate of `optimizer`; every group gets the same one.
        """
        return _schedule(optimizer, optim_config, self.steps_planned, taken=0)

    @property
    def steps_planned(self) -> int:
        """Returns the number of optimizer steps that this model takes in the whole run."""
        frozen = 0 if self.value_model else self.cfg.critic.warmup_steps
        return (self.cfg.trainer.steps - frozen) * self.cfg.algorithm.steps_per_rollout

    @property
    def schedule_steps(self) -> int:
        """Returns the number of optimizer steps that the learning-rate schedule has advanced by."""
        return 0 if self.lr_scheduler is None else self.lr_scheduler.last_epoch

    @schedule_steps.setter
    def schedule_steps(self, taken: int) -> None:
        assert self.optimizer is not None, "this model only scores"
        self.lr_scheduler = _schedule(
            self.optimizer, self.cfg.optimizer, self.steps_planned, taken=taken
        )

    @property
    def learning_rate(self) -> float:
        """Returns the learning rate of the next optimizer step."""
        assert self.lr_scheduler is not None, "this model only scores"
        return float(self.lr_scheduler.get_last_lr()[0])

    def train(self, learning: bool) -> None:
        """Switches the model to training (`learning`) or to scoring; only adapters have dropout."""
        learn(self.network, learning)
        if self.adapters is not None:
            self.adapters.train(learning)

    def zero_grad(self) -> None:
        for weight in self.trained:
            weight.parameter.grad = None

    def gather_nothing(self) -> None:
        """Frees all gathered parameters.

        With ZeRO-2 parameters would stay gathered after a pass without gradients, and be used again
        although their shards were updated or replaced in between.
        """
        for module in sharded_modules(self.network):
            module.reshard()

    def before_micro_batch(
        self, model: nn.Module, is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Prepares `model`, the network, for a micro-batch, and returns a context in which to run
        it.

        Replicas all-reduce their gradients after the last micro-batch of a step only
        (`is_last_micro_batch`); until then each replica accumulates its own gradients.
        """
        for module in sharded_modules(model):
            module.set_requires_all_reduce(is_last_micro_batch)
        return nullcontext() if self.dropped is None else self.dropped.drawn_from()

    why_no_backward = ""  # of Megatron's models alone

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss that was computed from `ModelRunner.forward`."""
        loss.backward()
        self.gather_nothing()

    def average_gradients(self) -> None:
        """Turns the gradients that `backward` added, which are sums over the processes, into means
        over the processes that computed different rows.
        """
        self.divide_gradients(self.placement.data)

    @torch.no_grad()
    def divide_gradients(self, count: int) -> None:
        """Divides the gradients, which are sums over all micro-batches and processes, by the global
        `count`.
        Partial gradients of replicated parameters are first summed over the tensor-parallel
        processes.
        """
        for weight in self.trained:
            if weight.partial and weight.parameter.grad is not None:
                gradient = local(weight.parameter.grad)
                total = gradient.to(self.where)
                dist.all_reduce(total, group=self.placement.tensor_group)
                gradient.copy_(total)
        for gradient in _gradients(self.trained):
            gradient.div_(max(count, 1))

    def weight_versions(self) -> dict[str, int]:
        """Returns for each weight how often it has been written to in place."""
        return {
            weight.name: weight.parameter._version
            for weight in self.weights_held
            if not weight.whole
        }

    def refuse_changed(self, before: Mapping[str, int]) -> None:
        """Raises CheckpointError if weights have been written to since `weight_versions` returned
        `before`. A model whose forward pass changes its own weights can't be trained, since the
        changed weights would be pushed and exported.
        """
        now = self.weight_versions()
        changed = [name for name, version in now.items() if version != before[name]]
        if changed:
            raise CheckpointError(
                f"{self.cfg.model.path}: {type(self.model).__name__} changes {len(changed)} of its own weights in its forward "
                f"pass, {changed[0]!r} first, so that other weights than those that learn would be exported. Take another model."
            )

    def refuse_lost_gradient(self) -> None:
        """Raises NothingTrained, on every process, if the adapters of a value model get no gradient
        although its value head gets one (see `ActiveAdapters`).

        The check is a collective. It ends with the first step in which the adapters have a
        gradient; models without adapters and policies are not checked.
        """
        if self.adapters is None or not self.value_model or self._reached.seen:
            return
        weights = [weight for weight in self.head if _decays(weight) and weight.rows.any()]
        self._reached.refuse_lost(_gradients(self.adapters.weights), _gradients(weights))

    @torch.no_grad()
    def take_step(self) -> tuple[bool, float]:
        """Clips the gradients, takes an optimizer step and advances the schedule; returns (whether
        the step was taken, global gradient norm before clipping).
        If the norm is not finite, no process takes the step: weights, optimizer state and schedule
        stay as they are, and the returned norm is NaN.
        """
        assert self.lr_scheduler is not None, "this model only scores"
        with span("optimizer step"):
            grad_norm = self._grad_norm()
            taken = math.isfinite(grad_norm)
            if taken:
                self._clip(grad_norm)
                self.residency.settle()
                self._step()
                self.residency.changed()
                self.rows_changed()
                self.lr_scheduler.step()
            self.zero_grad()
        return taken, grad_norm if taken else math.nan

    def _step(self) -> None:
        assert self.optimizer is not None
        for weight in self.trained:
            gradient = weight.parameter.grad
            weight.rows.grad = None if gradient is None else local(gradient)
        self.optimizer.step()
        for weight in self.trained:
            weight.rows.grad = None

    def _grad_norm(self) -> float:
        first = self.placement.tensor_rank == 0  # replicated ones count once
        counted = [weight for weight in self.trained if first or weight.split is not None]
        gradients = [weight.parameter.grad for weight in counted]
        squares = [local(each).float().square().sum() for each in gradients if each is not None]
        total = torch.stack(squares or [torch.zeros(())]).sum().to(self.where)
        dist.all_reduce(total, group=self.placement.replica_group)
        return float(total.sqrt())

    def _clip(self, grad_norm: float) -> None:
        largest = self.cfg.optimizer.clip_grad
        scale = largest / (grad_norm + 1e-6)
        if largest and scale < 1.0:
            for gradient in _gradients(self.trained):
                gradient.mul_(scale)

    def offload_param_and_grad(self, offload_grad: bool = False) -> None:
        """Moves this process's rows of the parameters to the host and, with `offload_grad`, of the
        gradients.
        """
        self.residency.off(PARAMETERS, *([GRADIENTS] if offload_grad else []))

    def load_param_and_grad(self, *, load_grad: bool = False) -> None:
        """Moves this process's rows of the parameters back to the device and, with `load_grad`, of
        the gradients.
        """
        self.residency.on(PARAMETERS, *([GRADIENTS] if load_grad else []))

    def offload_optimizer(self) -> None:
        """Moves Adam's moments to the host."""
        self.residency.off(ADAM)

    def load_optimizer(self) -> None:
        """Moves Adam's moments back to the device."""
        self.residency.on(ADAM)

    def rows_changed(self) -> None:
        """Marks the copies of this process's parameter rows in the forward pass's dtype as stale;
        to be called after a write to the rows, which are in the optimizer's dtype.
        """
        self._pushed_is_old = True

    @torch.no_grad()
    def take_pushed(self) -> None:
        """Copies the weights in the forward pass's dtype, which were loaded, to this process's
        parameter rows in the optimizer's dtype.
        """
        for weight in self.trained:
            if weight.pushed is not weight.rows:
                weight.rows.copy_(weight.pushed)
        self.residency.changed()

    @torch.no_grad()
    def finish_param_sync(self) -> None:
        """Updates the copies of this process's parameter rows in the forward pass's dtype if they
        are stale, and gathers the rows of LoRA matrices for merging; a collective if there are
        adapters.
        """
        if self._pushed_is_old:
            self._pushed_is_old = False
            for weight in self.trained:
                if weight.pushed is not weight.rows:
                    weight.pushed.copy_(weight.rows)
            if self.adapters is not None:
                self.adapters.gather(self.where)


def _decays(weight: Weight) -> bool:
    return weight.parameter.dim() > 1 and not weight.name.endswith("bias")


def _schedule(
    optimizer: torch.optim.Optimizer, chosen: OptimizerConfig, steps: int, *, taken: int
) -> LambdaLR:
    """Returns the schedule of `learning_rate` after `taken` of `steps` optimizer steps."""
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0  # LambdaLR multiplies it by the function's value
    return LambdaLR(
        optimizer, lambda done: learning_rate(chosen, done + 1, steps=steps), last_epoch=taken - 1
    )


def _gradients(weights: Iterable[Weight]) -> list[Tensor]:
    found = [weight.parameter.grad for weight in weights]
    return [local(gradient) for gradient in found if gradient is not None]
