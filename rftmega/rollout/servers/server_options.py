"""Says with which arguments and environment a vLLM server of a run is started, wherever that is."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftmega.config import RolloutConfig, RunConfig, served_rank
from rftmega.rollout.engines.vllm_models import limits_of, model_arguments, prefill_arguments, sees
from rftmega.rollout.servers.vllm import auth
from rftmega.runtime import device
from rftmega.weights.receivers.fp8 import described

RANKS_OWN = {  # what tells a process that it is a rank of the trainer
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "VLLM_ENABLE_V1_MULTIPROCESSING",
}

ADAPTER_WORKER = "rftmega.weights.receivers.adapter.AdapterWorker"


def arguments_of(
    folder: str | Path,
    config: RolloutConfig,
    *,
    dtype: str,
    adapter_rank: int = 0,
    unquantised: Sequence[str] = (),
) -> list[str]:
    """Returns the arguments of `vllm serve`. It starts with random weights; a push brings the real
    ones. `adapter_rank`: of adapters that it serves; 0: it serves none. `unquantised`: modules that
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
        "max-model-len": config.max_row_tokens,
        "max-num-seqs": config.max_batch,
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": config.transport}),
    }
    flags = [
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
        "--disable-log-stats",  # a tenth of what a short answer costs
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
        flags.append("--skip-tokenizer-init")  # processors of images and stop strings want it
    written_as = described(unquantised) if config.quantization == "fp8" else None
    given = prefill_arguments(config, on_cuda=on_cuda)
    given |= model_arguments(folder, on_cuda=on_cuda, written_as=written_as)
    for name, value in given.items():
        option = name.replace("_", "-")
        if value is False:
            flags.append(f"--no-{option}")
        else:
            arguments[option] = json.dumps(value)
    return [*flags, *(f"--{name}={value}" for name, value in arguments.items())]


def arguments_of_run(config: RunConfig, *, unquantised: Sequence[str] = ()) -> list[str]:
    """Returns the arguments of `vllm serve` for a run."""
    model = config.model
    return arguments_of(
        model.path,
        config.rollout,
        dtype=model.dtype,
        adapter_rank=served_rank(config),
        unquantised=unquantised,
    )


def environment_of(key: str) -> dict[str, str]:
    """Returns the environment of a server that asks everybody for `key`."""
    found = {name: value for name, value in os.environ.items() if name not in RANKS_OWN}
    found |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_MEDIA_CONNECTOR": "rftmega",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "0",
        auth.KEY: key,
    }
    if device.current().type == "cpu":
        found |= _on_shared_cores(found)
    return found


def _on_shared_cores(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what keeps a server of one process from waiting by spinning: the engine in the process
    of its scheduler, threads that sleep at a barrier. Others need the cores that they would spin on,
    above all the trainer: 512 answers of 4 tokens took 1 to 3 s, and take 0.3 s.
    """
    return {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_WAIT_POLICY": environment.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def devices_of(first: int, config: RolloutConfig) -> dict[str, str]:
    """Assigns devices, of those that are visible, from number `first` on; on a CPU servers share the
    cores with everybody.
    """
    if device.current().type == "cpu":
        bound = "nobind" if config.tensor == 1 else "|".join(_cores(config.tensor))
        return {"VLLM_CPU_OMP_THREADS_BIND": bound}
    places = range(first, first + config.tensor)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None  # this process counts within these
    chosen = [names[place] if names else str(place) for place in places]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _cores(number: int) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    return [str(cores[place % len(cores)]) for place in range(number)]
