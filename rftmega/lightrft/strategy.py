"""StrategyBase: LightRFT's strategy interface on top of rftmega. It delegates to rftmega and
computes nothing itself.

The module can be imported without Megatron. A subclass must implement the abstract methods, and
`_build_engine` and `update_engine_weights`.
"""

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from rftmega.config import DataConfig
from rftmega.core.errors import EngineError, RFTMegaError
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.data.sampler import ResumableSampler
from rftmega.lightrft.image_inputs import ANY_NUMBER, ImageInputs
from rftmega.lightrft.multimodal import build_inputs
from rftmega.lightrft.requests import (
    GenerationOutput,
    completions,
    read_sampling,
    seeds_of,
    token_lists,
)
from rftmega.rollout.engines import Engine, EngineStatus
from rftmega.runtime import device
from rftmega.runtime.parallel import collectives, process_group, seeds

__all__ = ["ENGINE_TYPES", "EngineStatus", "StrategyBase", "is_actor"]

ENGINE_TYPES = ("vllm", "transformers", "scripted")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_actor(model: Any) -> bool:
    """Returns whether `model`, with or without wrappers, is a policy, that is, has a method
    `log_probs`.

    Returns False for a value model.
    """
    return callable(getattr(_unwrapped(model), "log_probs", None))


def _as_list(given: Any) -> Sequence[Any]:
    """Returns the images or videos of a prompt as a list. `given`: a list, a single image or video,
    or None.
    """
    if given is None:
        return []
    return given if isinstance(given, list | tuple) else [given]


def _unwrapped(model: Any) -> Any:
    while not callable(getattr(model, "log_probs", None)) and hasattr(model, "module"):
        model = model.module
    return model


class StrategyBase(ABC):
    """StrategyBase builds models and engines and generates completions, under LightRFT's names.

    `inference_engine` is this process's engine, or its part of an engine that several processes
    share; None until `setup_inference_engine` is called.
    """

    # encodes text prompts: `encode(text, chat_template=False)`
    tokenizer: Any = None
    # of a vision-language model
    processor: ImageProcessor | None = None
    most_images = ANY_NUMBER  # maximum per prompt
    data_options: DataConfig | None = None  # options that select the frames of a video
    engine_processes = 1  # consecutive ranks that share an engine

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Any = None,
    ) -> None:
        """`max_norm`: the norm to which gradients are clipped. The batch sizes are numbers of
        completions.

        `args`: options under LightRFT's names; missing options have LightRFT's defaults.
        """
        self.seed = seed
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.args = args
        self.is_rlhf = False
        self.inference_engine: Engine | None = None
        self.inference_engine_type: str | None = None
        self._calls = 0  # engine calls so far, so that each has its own seeds
        self._joined = ExitStack()

    # Processes.

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int = 8
    ) -> None:
        """Joins the processes that torchrun started, unless this is already done, and seeds this
        process.

        `num_gpu_per_node` is used if the launcher does not set LOCAL_WORLD_SIZE. Raises
        RuntimeError if the launcher's environment variables are missing, ValueError if
        `args.engine_type` is unknown.
        """
        _check_engine_type(getattr(self.args, "engine_type", "vllm"))
        if not dist.is_initialized():
            if missing := [name for name in LAUNCHED if name not in os.environ]:
                raise RuntimeError(
                    f"{', '.join(missing)} must be set: start the program with torchrun."
                )
            os.environ.setdefault(
                "LOCAL_WORLD_SIZE", str(min(num_gpu_per_node, process_group.launched_size()))
            )
            given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            self._joined.enter_context(process_group.start(**given))
        self.set_seed(self.seed)

    def get_rank(self) -> int:
        """Returns the rank of this process; 0 if there is no process group."""
        return dist.get_rank() if dist.is_initialized() else 0

    @classmethod
    def is_rank_0(cls) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def set_seed(self, seed: int) -> None:
        """Seeds the random generators of Python, NumPy and torch, on the host and every device."""
        seeds.set_seed(seed)

    def all_gather(self, data: Any) -> Any:
        """Returns the tensors `data` of all processes, concatenated in rank order.

        A dict of tensors, which must have the same keys on every process, is gathered key by key.
        The tensors may differ in their first dimension. See `collectives.all_gather`.
        """
        if isinstance(data, dict):
            return _by_key(data, collectives.all_gather)
        return collectives.all_gather(data)

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Returns the mean, max or sum (`op`) over all processes of a tensor, a number, or a dict
        of them with the same keys on every process. The result has the form of `data`. Raises
        AssertionError for any other `op`. See `collectives.all_reduce`.
        """
        assert op in collectives.OPERATIONS, (
            f"op={op!r} is not one of {', '.join(collectives.OPERATIONS)}."
        )
        if isinstance(data, dict):
            return _by_key(data, lambda value: collectives.all_reduce(value, op))
        return collectives.all_reduce(data, op)

    @classmethod
    def print(cls, *msg: Any) -> None:
        """Prints a message in one line with the time, on rank 0 only."""
        if cls.is_rank_0():
            sys.stdout.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {' '.join(map(str, msg))}\n")
            sys.stdout.flush()

    @classmethod
    def report_memory(cls, prefix: str = "") -> None:
        """Prints the memory statistics of rank 0's device, in MiB."""
        held = ", ".join(
            f"{name} {size / 2**20:.1f} MiB" for name, size in device.current().memory().items()
        )
        cls.print(f"{prefix + ': ' if prefix else ''}{held}")

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Waits for the device and then for all processes, and then releases cached memory that is
        unused.
        """
        device.current().synchronize()
        if dist.is_initialized():
            dist.barrier()
        device.current().release_unused()

    # Models.

    @contextmanager
    def init_model_context(self) -> Iterator[None]:
        """Context manager in whose block models are built. At the end it prints memory statistics."""
        yield
        self.report_memory("models built")

    def prepare(self, *models_or_pairs: Any, is_rlhf: bool = False) -> Any:
        """Returns the models or (model, optimizer) tuples, with each model prepared for training: a
        list, or a single item if only one was given.

        `is_rlhf` is LightRFT's flag; it is stored and has no other effect.
        """
        self.is_rlhf = is_rlhf
        ready = [
            (self._prepare(item[0]), *item[1:]) if isinstance(item, tuple) else self._prepare(item)
            for item in models_or_pairs
        ]
        return ready[0] if len(ready) == 1 else ready

    def _prepare(self, model: Any) -> Any:
        return model

    def prepare_models_and_optimizers(
        self,
        actor: Any,
        critic: Any,
        reward_models: Any,
        initial_model: Any,
        args: Any,
        max_steps: int,
    ) -> tuple[Any, Any, Any, Any]:
        """Returns ((actor, optimizer, scheduler), (critic, optimizer, scheduler), reward models,
        initial model).

        The critic's tuple is (None, None, None) if there is no critic. `max_steps`: number of
        optimizer steps for which the learning-rate schedulers are built. `args` is ignored.
        """
        return (
            self._trained(actor, max_steps),
            self._trained(critic, max_steps),
            reward_models,
            initial_model,
        )

    def _trained(self, model: Any, max_steps: int) -> tuple[Any, Any, Any]:
        if model is None:
            return None, None, None
        optimizer = self.create_optimizer(model)
        return self._prepare(model), optimizer, self._scheduler(model, optimizer, max_steps)

    def _scheduler(self, model: Any, optimizer: Any, max_steps: int) -> Any:
        """Returns the learning-rate scheduler for `max_steps` optimizer steps; None for a constant
        learning rate.
        """
        return None

    def unwrap_model(self, model: Any) -> Any:
        """Returns `model` without the wrappers that a strategy has added."""
        while hasattr(model, "module"):
            model = model.module
        return model

    @abstractmethod
    def create_optimizer(self, model: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def backward(self, loss: Any, model: Any, optimizer: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def optimizer_step(
        self, optimizer: Any, model: Any, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> None:
        """Takes an optimizer step of `model`. `name` is used in logs only."""

    def maybe_load_optimizer(self, optimizer: Any, device: Any = None) -> Any:
        """Moves the optimizer state to `device` (None: this process's device) if the strategy keeps
        it on another one. Returns `optimizer`.
        """
        return optimizer

    def maybe_offload_optimizer(self, optimizer: Any) -> Any:
        """Moves the optimizer state to the host if the strategy offloads it. Returns `optimizer`."""
        return optimizer

    @abstractmethod
    def save_ckpt(
        self,
        model: Any,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
    ) -> None:
        """Saves a training checkpoint of `model` as `save_dir`/`tag`, with the dict `client_state`.

        `max_num`: maximum number of checkpoints in `save_dir`. `max_mem`: their maximum total size,
        in MB (10^6 bytes).
        """

    @abstractmethod
    def load_ckpt(
        self,
        model: Any,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Loads the training checkpoint `tag` in `load_dir` into `model`. Returns (the checkpoint's
        folder, the `client_state` saved with it).
        """

    def setup_dataloader(
        self,
        replay_buffer: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = True,
        sampler: Any = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """Returns a data loader for batches of `replay_buffer`, which yields the same batches on
        every process. Each iteration is one epoch, shuffled with its own seed. The loader skips the
        first `consumed_samples` samples, counted over all epochs, to continue where another loader
        stopped.

        The other arguments are as for torch's DataLoader. Raises ValueError for `consumed_samples`
        together with a `sampler`, which must resume by itself.
        """
        if sampler is not None and consumed_samples:
            raise ValueError(
                f"consumed_samples={consumed_samples} with a sampler of your own: give it one that starts there."
            )
        size = len(replay_buffer)
        per_epoch = size // batch_size * batch_size if drop_last else size
        return DataLoader(
            replay_buffer,
            batch_size=batch_size,
            sampler=sampler
            or ResumableSampler(
                size,
                shuffle=shuffle,
                seed=self.seed,
                consumed=consumed_samples,
                per_epoch=per_epoch,
            ),
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory and device.current().type == "cuda",
        )

    # Engines.

    def setup_inference_engine(
        self, args: Any, engine_type: str = "vllm", actor: Any = None
    ) -> Any:
        """Builds the engine, copies the weights of `actor`, if given, into it, and returns it.

        `args`: options for the engine, which a subclass may read. Raises ValueError for an unknown
        `engine_type`.
        """
        _check_engine_type(engine_type)
        self.inference_engine, self.inference_engine_type = (
            self._build_engine(args, engine_type),
            engine_type,
        )
        if actor is not None:
            self.update_engine_weights(actor)
        return self.inference_engine

    def _build_engine(self, args: Any, engine_type: str) -> Engine:
        raise NotImplementedError(
            f"{type(self).__name__} builds no engine. Take LightRFTStrategy, or set inference_engine."
        )

    def update_engine_weights(self, actor: Any) -> None:
        """Copies the actor's weights into the engine."""
        raise NotImplementedError(f"{type(self).__name__} moves no weights. Take LightRFTStrategy.")

    def maybe_sleep_inference_engine(self) -> None:
        """Frees the engine's memory, weights included, unless `args.enable_engine_sleep` is False.
        `update_engine_weights` must be called before the engine generates again. Does nothing
        without an engine. Raises ValueError if the engine's type is not one of ENGINE_TYPES.
        """
        if self.inference_engine is None or not getattr(self.args, "enable_engine_sleep", True):
            return
        _check_engine_type(self.inference_engine_type)
        self.inference_engine.sleep()
        self.sync_and_clear_cache()

    def wakeup_inference_engine(self) -> None:
        """Wakes the engine, after releasing unused cached memory that the engine may need. Raises
        ValueError if the engine's type is not one of ENGINE_TYPES.
        """
        _check_engine_type(self.inference_engine_type)
        assert self.inference_engine is not None
        self.sync_and_clear_cache()
        self.inference_engine.wake()

    @classmethod
    def _build_multimodal_inputs(
        cls, all_prompts: Any, all_images: Any, images_num: Any, all_videos: Any, videos_num: Any
    ) -> list[dict[str, Any]]:
        """Returns engine inputs made of prompts, images and videos; see `build_inputs`."""
        return build_inputs(all_prompts, all_images, images_num, all_videos, videos_num)

    def engine_generate_local(
        self, sampling_params: Any, prompt_token_ids: Any = None, multi_modal_inputs: Any = None
    ) -> list[GenerationOutput]:
        """Returns completions of prompts, generated by this process's engine. Processes that share
        the engine must make the same call.

        `prompt_token_ids`: one prompt or a list of prompts. `multi_modal_inputs`, which replaces
        it: the result of `_build_multimodal_inputs`; "prompt" is a text or token ids.
        `sampling_params`: see `read_sampling`. Raises ValueError unless exactly one of the two is
        given, EngineError for images and videos if the strategy has no `processor`, DataError for
        images and videos that can't be read.
        """
        if (prompt_token_ids is None) == (multi_modal_inputs is None):
            raise ValueError("Give prompt_token_ids or multi_modal_inputs: exactly one of them.")
        engine = self._the_engine()
        if multi_modal_inputs is None:
            multi_modal_inputs = [{"prompt": ids} for ids in token_lists(prompt_token_ids)]
        prompts = [self._prompt(given) for given in multi_modal_inputs]
        temperature, seed = read_sampling(sampling_params, longest=getattr(engine, "longest", None))
        source = f"{self._source(seed)}/engine {self.get_rank() // self.engine_processes}"
        found = self._generate(prompts, seeds_of(source, 0, len(prompts)), temperature)
        return completions([prompt.token_ids for prompt in prompts], found)

    def gather_and_generate(
        self,
        sampling_params: Any,
        all_prompt_token_ids: Any = None,
        all_prompts: Sequence[str] | None = None,
        all_images: Any = None,
        sleep_engine: bool = True,
        images_num: Any = None,
        all_videos: Any = None,
        videos_num: Any = None,
    ) -> list[GenerationOutput]:
        """Returns completions of this process's prompts, in their order. The prompts of all
        processes that share an engine are generated in one batch.

        Every process must call the method, with any number of prompts. Prompts are
        `all_prompt_token_ids` or, if that is None, the texts `all_prompts`. A completion depends on
        its prompt's position among all processes' prompts, not on which processes share an engine.
        `sleep_engine`: frees the engine's memory afterwards.

        `all_images` are PIL images, paths, bytes or base64, nested or flat with `images_num` (see
        `build_inputs`). A prompt has <image>, or the model's own placeholder, for each image, and
        is returned with one placeholder per feature. `all_videos` are paths, or frames (see
        `ImageInputs.read_videos`), for the <video> placeholders. Raises NotImplementedError without
        an engine, ValueError without prompts, and, on every process, EngineError for images and
        videos if the strategy has no `processor`, DataError for images and videos that can't be
        read (EngineError if another process passed them).
        """
        engine = self._the_engine()
        if all_prompt_token_ids is None and all_prompts is None:
            raise ValueError(
                "Give all_prompt_token_ids or all_prompts; an empty list where this process has none."
            )
        given = all_prompts if all_prompt_token_ids is None else token_lists(all_prompt_token_ids)
        temperature, seed = read_sampling(sampling_params, longest=getattr(engine, "longest", None))
        prompts: list[Prompt] = []
        problem: Exception | None = None
        try:
            inputs = self._build_multimodal_inputs(
                given, all_images, images_num, all_videos, videos_num
            )
            prompts = [self._prompt(each) for each in inputs]
        except (RFTMegaError, ValueError) as error:
            problem = error
        said = None if problem is None else str(problem)
        counts = collectives.gather_objects((len(prompts), said))
        if problem is not None:
            raise problem
        if others := [why for _, why in counts if why is not None]:
            raise EngineError(f"Another process's prompts can't be answered: {others[0]}")
        group, place = self._neighbours()
        parts = (
            collectives.gather_objects(prompts, group) if self.engine_processes > 1 else [prompts]
        )
        before = sum(number for number, _ in counts[: self.get_rank() - place])
        whole = [prompt for part in parts for prompt in part]
        found = self._generate(whole, seeds_of(self._source(seed), before, len(whole)), temperature)
        begin = sum(len(part) for part in parts[:place])
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        own = found[begin : begin + len(prompts)]
        return completions([prompt.token_ids for prompt in prompts], own)

    def _the_engine(self) -> Engine:
        if self.inference_engine is None:
            raise NotImplementedError(
                "There is no engine to generate with: call setup_inference_engine first."
            )
        return self.inference_engine

    def _generate(
        self, prompts: list[Prompt], seeds: list[int], temperature: float
    ) -> list[Completion]:
        return self._the_engine().generate(prompts, seeds=seeds, sampling=Sampling(temperature))

    @cached_property
    def _images(self) -> ImageInputs | None:
        if self.processor is None:
            return None
        return ImageInputs(
            self.processor, self._encode, most=self.most_images, options=self.data_options
        )

    def _prompt(self, given: dict[str, Any]) -> Prompt:
        """Returns the Prompt for an entry of the result of `_build_multimodal_inputs`."""
        data = given.get("multi_modal_data") or {}
        engine = self._the_engine()
        images, videos = (_as_list(data.get(kind)) for kind in ("image", "video"))
        if self._images is None:
            if images or videos:
                raise EngineError(
                    f"{type(engine).__name__} reads token ids only, and there are images or videos among the prompts: this "
                    "strategy has no `processor`, its model no vision tower. Leave them out."
                )
            ids = given["prompt"]
            return Prompt(tuple(self._encode(ids) if isinstance(ids, str) else ids))
        ids, placed = self._images.prompt(given["prompt"], images, videos)
        room = engine.row_tokens - getattr(engine, "longest", 0)
        if len(ids) > room:
            raise ValueError(
                f"A prompt has {len(ids)} tokens with its {len(placed)} image(s) or video(s), and the engine takes {room}: "
                "rollout.max_prompt_tokens. Raise it, or make them smaller."
            )
        return Prompt(ids, images=placed)

    def _source(self, seed: int | None) -> str:
        """Returns the name from which the seeds of a call are derived. The name contains `seed`,
        or, if that is None, the strategy's seed and the number of the call.
        """
        self._calls += 1
        return f"{self.seed}/call {self._calls}" if seed is None else f"given {seed}"

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "Prompts are texts, and this strategy has no tokenizer: set its `tokenizer`, or give token ids."
            )
        return list(self.tokenizer.encode(text, chat_template=False))

    def _neighbours(self) -> tuple[Any, int]:
        """Returns (process group, index): the group of the processes that share this process's
        engine, and the index of this process in the group. The group is None if no other process
        shares the engine.
        """
        if self.engine_processes == 1:
            return None, 0
        if not hasattr(self, "_group"):
            self._group = collectives.neighbours(self.engine_processes)
        return self._group, self.get_rank() % self.engine_processes


def _by_key(data: dict[str, Any], collective: Callable[[Any], Any]) -> dict[str, Any]:
    # the order of keys may differ between processes
    found = {name: collective(data[name]) for name in sorted(data)}
    return {name: found[name] for name in data}


def _check_engine_type(engine_type: Any) -> None:
    if engine_type not in ENGINE_TYPES:
        raise ValueError(
            f"Engine type {engine_type!r} is not supported. Choose one of {', '.join(ENGINE_TYPES)}."
        )
