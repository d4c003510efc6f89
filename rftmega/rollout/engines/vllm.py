"""vLLM engine inside the trainer's own processes, on the same devices. One engine uses
`rollout.tensor` consecutive ranks (tensor parallelism).

Weights are always loaded through vLLM's own reload, since vLLM repacks parameters after loading;
parameters are never written directly.
"""

import logging
import os
import traceback
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rftmega
from rftmega.config import RolloutConfig
from rftmega.config.options.speculative import DraftModel
from rftmega.core import expert_routes
from rftmega.core.errors import EngineError, EngineFault
from rftmega.core.expert_routes import RoutedModel
from rftmega.core.types import Completion, Sampling
from rftmega.data.media.audio_processor import audio_processor_of
from rftmega.data.media.image_processor import ImageProcessor
from rftmega.rollout.engines.base import Engine
from rftmega.rollout.requests import Request, Requests
from rftmega.rollout.requests.partial_completion import PartialCompletion
from rftmega.runtime import device
from rftmega.runtime.parallel.process_group import World, undone
from rftmega.runtime.parallel.watchdog import mark

# vLLM reads these when it is imported, and logs before it has read the second.
# the engine shares this process with the trainer
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if device.current().type == "cpu":
    # otherwise the first two batches with log-probs compile for 10 s
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

# isort: split
import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402

from rftmega.rollout.engines.compiled_classes import ChangedClasses  # noqa: E402
from rftmega.rollout.engines.draft_model import reload_draft_model  # noqa: E402
from rftmega.rollout.engines.expert_routing import CapturedRoutes  # noqa: E402
from rftmega.rollout.engines.image_prompts import (  # noqa: E402
    check_expanded,
    check_samples,
    placeholders,
    prompt_of,
    samples_of_vllm,
)
from rftmega.rollout.engines.speculative_verification import check_installed, install  # noqa: E402
from rftmega.rollout.engines.vllm_models import (  # noqa: E402
    engine_row_tokens,
    limits_of,
    model_arguments,
    prefill_arguments,
    reads_text,
    sees,
    speculation_arguments,
    stop_strings,
)
from rftmega.rollout.engines.waveforms import WaveformPrompts  # noqa: E402
from rftmega.weights.receivers.adapter import adapters_of, set_adapter  # noqa: E402
from rftmega.weights.receivers.expert_slices import expert_slices  # noqa: E402
from rftmega.weights.receivers.fp8 import described, quantised  # noqa: E402
from rftmega.weights.receivers.reload import (  # noqa: E402
    FreshParameters,
    forget_expert_kernels,
    name_loaders,
    pack_output_heads,
    with_head_bias,
)


def _share_cores(world: World) -> None:
    """Binds each local rank to a CPU core of its own through VLLM_CPU_OMP_THREADS_BIND, since the
    ranks of an engine must not share a core.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault(
        "VLLM_CPU_OMP_THREADS_BIND",
        "|".join(str(cores[rank % len(cores)]) for rank in range(world.local_size)),
    )


def _unlink_shared_memory(world: World, size: int, *, mine: bool) -> None:
    """Deletes the files in /dev/shm through which the ranks of an engine on a CPU communicate. They
    have the same names in every run, and files left by a killed run would keep the next run from
    starting. So they are deleted before a start and again as soon as all ranks have joined.

    `size`: ranks of the engine. `mine`: whether this engine created the files; otherwise files that
    a living process maps are kept.
    """
    first = world.rank - world.rank % size
    ranks = "-".join(str(rank) for rank in range(first, first + size))
    for file in Path("/dev/shm").glob(f"*-[[]{ranks}]-cpushm_{world.rank - first}"):
        # another starting run may own it: vLLM's own error is better than breaking that run
        if mine or not _is_mapped(file):
            file.unlink(missing_ok=True)


def _is_mapped(file: Path) -> bool:
    """Returns whether a living process has mapped the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended
            if str(file) in maps.read_text():
                return True
    return False


def _itself(model: Any) -> Any:
    """Returns `model` unchanged; passed to `LLM.apply_model`, which then returns the model."""
    return model


def _said(error: BaseException) -> str:
    """Returns the class and text of an error on one line, of 500 characters at most and without vLLM's
    list of all its architectures, and where it was raised.
    """
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    text = text.partition(". Supported architectures")[0][:500].rstrip(": .")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _is_raised_by_vllm(error: BaseException) -> bool:
    """Returns whether vLLM's code raised the error, or a library that it called, rather than the
    source of the weights, which is this package's.
    """
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    both = Path(vllm.__file__).parent, Path(rftmega.__file__).parent
    known = [each for each in frames if any(map(each.is_relative_to, both))]
    return bool(known) and known[-1].is_relative_to(both[0])


def _logprobs(completion: Any) -> list[float]:
    """Returns the log-prob of each sampled token of `completion`, a vLLM CompletionOutput."""
    pairs = zip(completion.token_ids, completion.logprobs or (), strict=True)
    return [at[token].logprob for token, at in pairs]


class RunningRequest(NamedTuple):
    """RunningRequest is a request that vLLM is generating a completion for."""

    name: str  # vLLM's internal id
    tokens: int  # of its prompt


class VLLMEngine(Engine):
    """VLLMEngine generates completions with vLLM in the trainer's process. Prompts and completions
    are token ids; the log-probs are of the sampling distribution (after temperature, top-p, ...).
    """

    def __init__(
        self,
        folder: str | Path,
        config: RolloutConfig,
        world: World,
        *,
        dtype: str,
        stop_ids: Sequence[int],
        adapter_rank: int = 0,
        evaluated: Mapping[str, str] | None = None,
        routed: RoutedModel | None = None,
        unquantised: Sequence[str] = (),
    ):
        """Builds vLLM, whose weights are random until a push; a collective over the engine's
        processes.

        `folder`: Hugging Face folder of the model. `stop_ids`: tokens that end a completion.
        `adapter_rank`: rank of the LoRA adapter to serve; 0: none. `evaluated`: further adapters
        for evaluation, name -> PEFT folder, of at most that rank; an empty folder means the base
        model. `routed`: the MoE model whose expert routes are recorded; None: no routes are
        recorded. `unquantised`: names of modules that keep their precision under
        rollout.quantization.
        """
        super().__init__()
        self._folder = folder
        if config.tensor > 1:
            _share_cores(world)
            _unlink_shared_memory(world, config.tensor, mine=False)
        else:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self.stop_ids, self.config = list(stop_ids), config
        self.longest, self.slots = config.max_response_tokens, config.max_batch
        self.row_tokens = config.max_row_tokens
        self.draft_tokens = config.speculative.draft_tokens
        self._counts_drafts = world.rank % config.tensor == 0  # once for an engine
        on_cuda = device.current().type == "cuda"
        precision: Any = (
            dtype if dtype != "auto" else str(device.current().train_dtype).removeprefix("torch.")
        )
        memory: dict[str, Any] = (
            {"gpu_memory_utilization": config.memory_fraction, "enable_sleep_mode": True}
            if on_cuda
            else {"kv_cache_memory_bytes": int(config.cpu_cache_gib * 2**30)}
        )
        images, audio_processor = sees(folder), audio_processor_of(folder)
        self._waveforms = WaveformPrompts(audio_processor) if audio_processor else None
        media: dict[str, Any] = {}
        if audio_processor:
            media["limit_mm_per_prompt"] = {"audio": max(1, config.max_images)}
        if images:
            media["limit_mm_per_prompt"] = limits_of(config)
        serves: dict[str, Any] = {}
        self._adapter: Any = None  # the one for new requests
        self._adapters: dict[str, Any] = {}
        if adapter_rank:
            self._adapters = adapters_of(evaluated or {})
            self._adapter = self._adapters[""]
            slots = sum(each is not None for each in self._adapters.values())
            serves = {"enable_lora": True, "max_lora_rank": adapter_rank, "max_loras": slots}
        self._routed = routed
        if routed and on_cuda:
            serves["enable_return_routed_experts"] = True
        speculation = speculation_arguments(folder, config, on_cuda=on_cuda, stop_ids=stop_ids)
        if speculation:
            install()
        self._quantised = config.quantization == "fp8"
        written_as = described(unquantised) if self._quantised else None
        threads = torch.get_num_threads()
        self._llm: Any = None
        changed = ChangedClasses()
        with undone(world, self.close), changed.collected():
            try:
                self._llm = LLM(
                    model=str(folder),
                    load_format="dummy",
                    # image and audio processors, stop strings and some models need a tokenizer
                    skip_tokenizer_init=not media and not config.stop and not reads_text(folder),
                    dtype=precision,
                    tensor_parallel_size=config.tensor,
                    distributed_executor_backend="external_launcher",
                    max_model_len=engine_row_tokens(folder, config),
                    max_num_seqs=config.max_batch,
                    enforce_eager=not on_cuda,
                    # of the sampling distribution, including temperature
                    logprobs_mode="processed_logprobs",
                    seed=world.rank // config.tensor,  # ranks of one engine must sample alike
                    disable_log_stats=True,
                    use_tqdm_on_load=False,  # its progress bars would clutter the run's output
                    **memory,
                    **media,
                    **serves,
                    **speculation,
                    **prefill_arguments(folder, config, on_cuda=on_cuda),
                    **model_arguments(folder, on_cuda=on_cuda, written_as=written_as),
                )
                if not on_cuda:  # there it runs a batch at its start
                    self._generate_once()
            except Exception as error:  # of vLLM's code for each model
                raise EngineError(
                    f"vLLM {vllm.__version__} could not be started with the model of {folder}: {_said(error)}. If it does not "
                    "support the model, set rollout.engine=transformers."
                ) from error
            # vLLM's worker sets one thread, too few for the trainer's work on the host
            if on_cuda:
                torch.set_num_threads(threads)
            changed.give_to(self._llm.apply_model(_itself)[0])
            if speculation:
                check_installed(self._runner)
            self._read_model(world, on_cuda=on_cuda)

    def _generate_once(self) -> None:
        """Generates two tokens, so that a model whose layers vLLM has no kernels for fails now."""
        engine = self._llm.llm_engine
        parameters = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        engine.add_request("first", {"prompt_token_ids": [0, 0]}, parameters)
        while engine.has_unfinished_requests():
            engine.step()
        self._llm.reset_prefix_cache()

    def _read_model(self, world: World, *, on_cuda: bool) -> None:
        """Checks that vLLM preprocesses images and waveforms as the trainer does, and prepares
        access to the parameters (to write pushes) and to the MoE routers (to record routes).
        `on_cuda`: whether the engine runs on a GPU.
        """
        config = self.config
        if sees(self._folder):
            processor = ImageProcessor(self._folder)
            tokens = placeholders(processor, videos=config.max_videos > 0)
            check_samples(samples_of_vllm(self._llm.llm_engine.renderer, tokens), processor)
        if self._waveforms:
            self._waveforms.check(self._llm.llm_engine)
        self._model = module = self._llm.apply_model(_itself)[0]
        if not self._quantised:  # its loader alone knows how such numbers lie
            self.destinations = FreshParameters(module)
        self._captured: CapturedRoutes | None = None
        if self._routed and not on_cuda:
            self._captured = CapturedRoutes(module, self._runner, self._routed, self.row_tokens)
        if config.tensor > 1:
            _unlink_shared_memory(world, config.tensor, mine=True)

    def _serve(self, requests: Requests, sampling: Sampling) -> None:
        engine = self._llm.llm_engine
        begun, running = 0, dict[int, RunningRequest]()
        unchecked: dict[int, Request] = {}  # with images
        try:
            further, stopped = requests.take(self.slots), False
            while not stopped:
                for request in further:
                    parameters = self._parameters(request, sampling)
                    prompt = self._prompt_of(request)
                    name = engine.add_request(
                        str(begun), prompt, parameters, lora_request=self._adapter
                    )
                    if request.images:
                        unchecked[begun] = request
                    running[begun] = RunningRequest(name, len(request.token_ids))
                    begun += 1
                if not running:
                    break
                mark()
                done: dict[int, Completion] = {}
                for output in self._step():
                    number = int(output.request_id)
                    if number in unchecked:
                        check_expanded(unchecked.pop(number), output.prompt_token_ids)
                    done[number] = self._completion(output.outputs[0], running.pop(number))
                if done:
                    requests.finished(list(done), list(done.values()))
                stopped = requests.stopped()
                if stopped and requests.wants_parts:
                    parts = {number: self._part(number, asked) for number, asked in running.items()}
                    requests.broken_off(parts)
                room = self.slots - len(running)
                has_room = room > 0 and not stopped and not self._waiting()
                further = requests.take(room) if has_room else ()
        finally:  # leave no request to the next call
            engine.abort_request([str(number) for number in sorted(running)])

    def _prompt_of(self, request: Request) -> dict[str, Any]:
        return self._waveforms.prompt_of(request) if self._waveforms else prompt_of(request)

    def _parameters(self, request: Request, sampling: Sampling) -> Any:
        return SamplingParams(
            **sampling._asdict(),
            **stop_strings(self.config),
            seed=request.seed,
            max_tokens=request.limit(self.longest, self.row_tokens),
            logprobs=0,  # of the sampled token only
            stop_token_ids=self.stop_ids,
            # only our stop tokens count, whatever eos the model's config has
            ignore_eos=True,
            skip_clone=True,  # not shared with other requests
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _waiting(self) -> int:
        """Returns how many requests wait for space in the KV cache. While there are any, the engine
        takes no new requests, since those may start sooner on another engine.
        """
        waiting: int = self._llm.llm_engine.engine_core.engine_core.scheduler.get_request_counts()[
            1
        ]
        return waiting

    def _step(self) -> list[Any]:
        """Runs one step of vLLM. Returns vLLM's outputs for the requests that finished in it.

        Raises EngineFault for any error in vLLM: invalid requests were refused before.
        """
        try:
            outputs: list[Any] = self._llm.llm_engine.step()
        except Exception as error:
            raise EngineFault(f"vLLM failed while generating: {_said(error)}") from error
        return outputs

    @property
    def _runner(self) -> Any:
        """Returns the model runner of vLLM's worker in this process."""
        core = self._llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def draft_counts(self) -> list[int]:
        if not self.draft_tokens or not self._counts_drafts:
            return super().draft_counts()
        counts: list[int] = self._runner.rejection_sampler.counts.take(self.draft_tokens)
        return counts

    def _routes(self, completion: Any, asked: RunningRequest) -> Tensor | None:
        """Returns the expert routes of all tokens that the model processed for vLLM's `completion`
        of the request `asked`; None if routes are not recorded or the completion is empty.
        """
        fed = asked.tokens + len(completion.token_ids) - 1
        if self._routed is None or not completion.token_ids:
            return None
        if self._captured is not None:
            return self._captured.take(asked.name, fed)
        return expert_routes.of_vllm(completion.routed_experts, self._routed, fed)

    def _completion(self, completion: Any, asked: RunningRequest) -> Completion:
        assert self.version is not None
        assert completion.finish_reason in ("stop", "length"), completion.finish_reason
        return Completion(
            completion.token_ids,
            _logprobs(completion),
            completion.finish_reason,
            self.version,
            routes=self._routes(completion, asked),
        )

    def _part(self, number: int, asked: RunningRequest) -> PartialCompletion:
        """Returns the tokens that the running request `asked` has so far, with log-probs. `number`:
        its number in the order of submission.
        """
        processor = self._llm.llm_engine.output_processor
        (known,) = processor.external_req_ids[str(number)]
        output = processor.request_states[known].make_request_output(
            [], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )
        completion = output.outputs[0]
        assert self.version is not None
        versions = array("i", [self.version]) * len(completion.token_ids)
        ids, logprobs = array("i", completion.token_ids), array("f", _logprobs(completion))
        return PartialCompletion(ids, logprobs, versions, routes=self._routes(completion, asked))

    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._llm.apply_model(forget_expert_kernels)
        self._llm.apply_model(name_loaders)
        if self._quantised:
            device.current().prepare_fp8()
            named_tensors = quantised(named_tensors)
        named_tensors = expert_slices(self._folder, named_tensors)
        try:
            self._llm.collective_rpc(
                "reload_weights",
                kwargs={"weights_iterator": with_head_bias(self._model, named_tensors)},
            )
        except Exception as error:
            # Half-loaded layers would take their missing tensors from the next push.
            self._llm.apply_model(
                partial(finalize_layerwise_reload, model_config=self._llm.model_config)
            )
            if not _is_raised_by_vllm(error):  # the tensors' source failed
                raise
            raise EngineError(
                f"vLLM {vllm.__version__} can't load the weights of the model of {self._folder}: {_said(error)}. "
                "Set rollout.engine=transformers."
            ) from error
        finally:
            if self.destinations:
                self.destinations.release()
        self._llm.apply_model(pack_output_heads)
        self._forget_computed()

    def _load_adapter(self, pairs: dict[str, Tensor], said: dict[str, Any]) -> None:
        assert self._adapter is not None, "the engine was built without a place for an adapter"
        self._llm.collective_rpc(set_adapter, args=(pairs, said))
        self._forget_computed()

    def use_adapter(self, adapter: str) -> None:
        self._adapter = self._adapters[adapter]
        if self._captured is not None:  # vLLM's own cache distinguishes adapters
            self._forget_computed()

    def _forget_computed(self) -> None:
        """Drops the prefix and encoder caches, which hold results of earlier weights."""
        if self._captured is not None:
            self._captured.forget()
        self._llm.reset_prefix_cache()
        # embeddings of images and waveforms, which the scheduler would still reuse
        self._llm.llm_engine.reset_encoder_cache()

    def _sleep(self) -> None:
        with device.current().remapping():
            self._llm.sleep(level=2)

    def _wake(self, parts: Sequence[str]) -> None:
        with device.current().remapping():
            self._llm.wake_up(tags=list(parts))
        if "weights" in parts and isinstance(self.config.speculative, DraftModel):
            self._llm.collective_rpc(reload_draft_model)

    def close(self) -> None:
        """Shuts down vLLM and its process groups, also if building vLLM failed."""
        if self._llm is None:
            cleanup_dist_env_and_memory()
        else:
            self._llm.llm_engine.engine_core.shutdown()
            device.current().nothing_remapped()
