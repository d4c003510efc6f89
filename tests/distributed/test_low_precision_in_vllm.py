"""vLLM with weights of 8 bits, which it multiplies on CUDA and on CPUs with AMX; what a push gives it is
tested anywhere (tests/distributed/test_low_precision.py).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Prompt, Sampling
from rftmega.run.placement.engines import modules_kept
from rftmega.runtime import device
from rftmega.weights import EngineWeights
from tests.block_scales import PLAIN, meant, quantised
from tests.layouts import build_manager
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import save_tiny

PRELOADED = VLLM

WHOLE = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 256}
PROMPTS = [Prompt((5, 9, 100)), Prompt((3,)), Prompt(tuple(range(2, 90)))]


def body(world: Any, folder: Path) -> Any:
    from rftmega.rollout.engines.vllm import VLLMEngine

    config = RolloutConfig(
        max_prompt_tokens=100, max_response_tokens=16, max_batch=4, memory_fraction=0.1, quantization="fp8",
    )  # fmt: skip
    engine = VLLMEngine(
        folder, config, world, dtype="bfloat16", stop_ids=[1], unquantised=modules_kept(str(folder))
    )
    manager = build_manager(folder, ParallelConfig(), dtype="bfloat16")
    weights = EngineWeights(manager.shards(), engine, bucket_bytes=2**20)
    found = []
    try:
        for version in range(2):
            weights.push(version=version)
            completions = engine.generate(PROMPTS, seeds=range(3), sampling=Sampling(1.0))
            found.append([(list(each.token_ids), list(each.logprobs)) for each in completions])
            engine.sleep()
    finally:
        engine.close()
    return found


def server_body(world: Any, folder: Path, logs: Path, transport: Any) -> Any:
    from rftmega.rollout.servers.server_engine import ServerEngine

    config = RolloutConfig(
        max_prompt_tokens=100, max_response_tokens=16, max_batch=4, cpu_cache_gib=0.05, transport=transport,
        memory_fraction=0.1, quantization="fp8", weights_folder=str(logs / "weights"),
    )  # fmt: skip
    kept = modules_kept(str(folder))
    engine: Any = ServerEngine(
        folder,
        config,
        world,
        dtype="bfloat16",
        stop_ids=[1],
        logs=logs / "servers",
        unquantised=kept,
    )
    manager = build_manager(folder, ParallelConfig(tensor=2), dtype="bfloat16")
    found = []
    try:
        weights = engine.weight_sync(manager.shards(), bucket_bytes=2**20)
        for version in range(2):
            weights.push(version=version)
            if world.is_main:
                completions = engine.generate(PROMPTS, seeds=range(3), sampling=Sampling(1.0))
                found.append([(list(each.token_ids), list(each.logprobs)) for each in completions])
            torch.distributed.barrier()
    finally:
        engine.close()
    return found


def assert_completions_of_rounded_weights(folder: Path, found: Any) -> None:
    """Compares log-probs with those of transformers, with each weight rounded in blocks."""
    from transformers import AutoModelForCausalLM

    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in PLAIN):
            rounded = tensor.bfloat16().float()
            tensors[name] = meant(*quantised(rounded, (128, 128)), (128, 128))
    save_file(tensors, file, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gaps = []
    for completions in found:
        for prompt, (ids, logprobs) in zip(PROMPTS, completions, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt.token_ids, *ids][:-1]])).logits[0]
            wanted = logits[-len(ids) :].log_softmax(-1)
            wanted = wanted.gather(-1, torch.tensor(ids)[:, None])[:, 0]
            gaps += (wanted - torch.tensor(logprobs)).abs().tolist()
    assert gaps
    assert sum(gaps) / len(gaps) < 0.05


@pytest.mark.parametrize("variant", [pytest.param("qwen3", marks=pytest.mark.ranks), "qwen3-moe"])
def test_log_probs_are_those_of_the_rounded_model_as_far_as_8_bits_of_activations_go(
    variant: str, tmp_path: Path
) -> None:
    if not device.current().has_fp8_matmul():
        pytest.skip("this machine does not multiply in 8 bits")
    more = {"moe_intermediate_size": 128} if variant == "qwen3-moe" else {}
    folder = save_tiny(tmp_path / "model", variant, **WHOLE, **more)
    (found,) = run_ranks(1, body, folder)
    assert_completions_of_rounded_weights(folder, found)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shared_memory", "network", "disk"])
def test_servers_answer_with_the_rounded_weights(transport: str, tmp_path: Path) -> None:
    if not device.current().has_fp8_matmul():
        pytest.skip("this machine does not multiply in 8 bits")
    folder = save_tiny(tmp_path / "model", "qwen3", **WHOLE)
    found, _ = run_ranks(2, server_body, folder, tmp_path, transport, timeout=300)
    assert_completions_of_rounded_weights(folder, found)
