"""Command-line arguments and environment variables of a run's vLLM servers, local or remote."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RolloutConfig, RunConfig, served_rank
from rftmega.rollout.engines.plugin import VERIFIER
from rftmega.rollout.engines.vllm_models import (
    engine_row_tokens,
    limits_of,
    model_arguments,
    prefill_arguments,
    sees,
    speculation_arguments,
)
from rftmega.rollout.servers.vllm import auth
from rftmega.runtime import device
from rftmega.weights.receivers.fp8 import described

RANKS_OWN = {  # variables that make a process a rank of the trainer
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "VLLM_ENABLE_V1_MULTIPROCESSING",
}

ADAPTER_WORKER = "rftmega.weights.receivers.adapter.AdapterWorker"
DRAFTING_WORKER = "rftmega.rollout.servers.vllm.drafting_worker.DraftingWorker"


def arguments_of(
    folder: str | Path,
    config: RolloutConfig,
    *,
    dtype: str,
    adapter_rank: int = 0,
    unquantised: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
) -> list[str]:
    """Returns the command-line arguments of `vllm serve` for the model in `folder`; the server then
    has random weights until a push. `stop_ids`: tokens that end a completion, as far as they are
    known. `dtype`: dtype of the weights, "auto" for the trainer's;
    `adapter_rank`: rank of the LoRA adapter to serve, 0: none; `unquantised`: names of modules that
    keep their precision under rollout.quantization.
    """
    on_cuda = device.current().type == "cuda"
    if dtype == "auto":
        dtype = str(device.current().train_dtype).removeprefix("torch.")
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load-format": "dummy",
        "dtype": dtype,
        "tensor-parallel-size": config.tensor,
        "max-model-len": engine_row_tokens(folder, config),
        "max-num-seqs": config.max_batch,
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": config.transport}),
    }
    flags = [
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
        "--disable-log-stats",  # a tenth of the cost of a short completion
    ]
    flags.append(f"--middleware={auth.Authentication.__module__}.{auth.Authentication.__name__}")
    if config.router_replay == "engine":
        flags.append("--enable-return-routed-experts")
    if adapter_rank:
        flags.append("--enable-lora")
        arguments |= {"max-lora-rank": adapter_rank, "max-loras": 1}
        arguments["worker-extension-cls"] = ADAPTER_WORKER
    if on_cuda:
        arguments["gpu-memory-utilization"] = config.memory_fraction
    else:
        arguments["kv-cache-memory-bytes"] = int(config.cpu_cache_gib * 2**30)
        flags.append("--enforce-eager")
    if sees(folder):
        arguments["limit-mm-per-prompt"] = json.dumps(limits_of(config))
    elif not config.stop:
        flags.append("--skip-tokenizer-init")  # image processors and stop strings need it
    written_as = described(unquantised) if config.quantization == "fp8" else None
    given = prefill_arguments(folder, config, on_cuda=on_cuda)
    if speculation := speculation_arguments(folder, config, on_cuda=on_cuda, stop_ids=stop_ids):
        given |= speculation
        arguments["worker-extension-cls"] = DRAFTING_WORKER
    given |= model_arguments(folder, on_cuda=on_cuda, written_as=written_as)
    for name, value in given.items():
        option = name.replace("_", "-")
        if value is False:
            flags.append(f"--no-{option}")
        else:
            arguments[option] = json.dumps(value)
    return [*flags, *(f"--{name}={value}" for name, value in arguments.items())]


def arguments_of_run(config: RunConfig, *, unquantised: Sequence[str] = ()) -> list[str]:
    """Returns the command-line arguments of `vllm serve` for a run's config. `unquantised`: names
    of modules that keep their precision under rollout.quantization.
    """
    model = config.model
    return arguments_of(
        model.path,
        config.rollout,
        dtype=model.dtype,
        adapter_rank=served_rank(config),
        unquantised=unquantised,
    )


def environment_of(key: str, *, speculates: bool = False) -> dict[str, str]:
    """Returns the environment variables for a server process: this process's, with the
    authentication key `key` that the server will require. `speculates`: whether it decodes
    speculatively.
    """
    found = {name: value for name, value in os.environ.items() if name not in RANKS_OWN}
    found |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_MEDIA_CONNECTOR": "rftmega",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "0",
        auth.KEY: key,
    }
    if speculates:
        found |= {VERIFIER: "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}  # which has another verifier
    if device.current().type == "cpu":
        found |= _on_shared_cores(found)
    return found


def _on_shared_cores(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that keep a single-process CPU server from busy-waiting: the
    engine runs in its scheduler's process, and threads sleep at barriers. Other processes, above
    all the trainer, need these cores: 512 completions of 4 tokens took 1 to 3 s, and take 0.3 s.
    `environment`: the server's variables so far.
    """
    return {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_WAIT_POLICY": environment.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def devices_of(first: int, config: RolloutConfig) -> dict[str, str]:
    """Returns the environment variable that assigns a server its devices: `rollout.tensor`
    consecutive ones from device number `first` on. On a CPU, servers share the cores with all other
    processes.
    """
    if device.current().type == "cpu":
        bound = "nobind" if config.tensor == 1 else "|".join(_cores(config.tensor))
        return {"VLLM_CPU_OMP_THREADS_BIND": bound}
    places = range(first, first + config.tensor)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None  # device numbers are relative to these
    chosen = [names[place] if names else str(place) for place in places]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _cores(number: int) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    return [str(cores[place % len(cores)]) for place in range(number)]
