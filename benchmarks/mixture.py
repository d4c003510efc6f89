"""The push of a mixture with as many tensors as Qwen3-30B-A3B has, and next to nothing in them: what is left is Python."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from converters import shard_shape, table
from converters.rules import instances
from model_providers.description import describe
from model_providers.hf_config import read_hf_config
from rftmega.config import RolloutConfig
from rftmega.megatron.binding import Bound
from rftmega.weights import EngineWeights
from rftmega.weights.replay import Filling
from tests.ranks import run_ranks

BUCKET_BYTES = 256 * 2**20
ROUNDS = 5


def save_config(folder: Path, *, layers: int = 48, experts: int = 128) -> Path:
    """Qwen3-30B-A3B's layers and experts, of the least width that vLLM's kernels take on a CPU."""
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=256,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder


def parameters_of(folder: Path, rank: int, ranks: int) -> list[Bound]:
    """What a trainer's process holds of it, without a trainer: experts spread over the processes, everything else whole."""
    config = read_hf_config(folder)
    model = describe(config)
    experts = model.experts.number if model.experts else 0
    return [
        Bound(rule, layer, expert, torch.randn(shard_shape(rule, 0, 1), dtype=torch.bfloat16), 0, 1)
        for rule, layer, expert in instances(table(config), layers=model.layers, experts=experts)
        if expert is None or expert * ranks // experts == rank
    ]


def processor_seconds(work: Any) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


@contextmanager
def copying_nothing() -> Iterator[None]:
    """Within, vLLM's reload makes and repacks its layers as ever, and nobody copies to them."""
    plain = Filling.into

    def counted(self: Filling, parameter: torch.Tensor) -> None:
        if parameter.is_meta:
            plain(self, parameter)
        self.done = True

    Filling.into = counted  # type: ignore[method-assign]
    yield
    Filling.into = plain  # type: ignore[method-assign]


def body(world: Any, folder: Path) -> dict[str, float]:
    from rftmega.rollout.vllm import VLLMEngine

    held = parameters_of(folder, world.rank, world.size)
    config = RolloutConfig(max_prompt_tokens=32, max_response_tokens=12, cpu_cache_gib=0.05, max_batch=8)
    engine = VLLMEngine(folder, config, world, dtype="bfloat16", stop_ids=[1])
    made: list[EngineWeights] = []
    plan = processor_seconds(lambda: made.append(EngineWeights(held, engine, bucket_bytes=BUCKET_BYTES)))
    (weights,) = made
    versions = count()

    def push() -> None:
        weights.push(version=next(versions))

    first = processor_seconds(push)
    pushes = sorted(processor_seconds(push) for _ in range(ROUNDS))
    with copying_nothing():
        reloads = sorted(processor_seconds(push) for _ in range(ROUNDS))
    tensors = len({name for unit in (unit for bucket in weights.buckets for unit in bucket.units) for name, _, _ in unit.planned})
    dist.barrier()
    engine.close()
    return {
        "tensors": float(tensors),
        "plan_seconds": plan,
        "first_push_us_a_tensor": first / tensors * 1e6,
        "push_us_a_tensor": pushes[ROUNDS // 2] / tensors * 1e6,
        "of_it_vllms_us_a_tensor": reloads[ROUNDS // 2] / tensors * 1e6,
    }


def many_tensors(folder: Path) -> dict[str, float]:
    save_config(folder)
    found = {}
    for name, processes in (("nothing moved", 1),):
        for figure, value in run_ranks(processes, body, folder, timeout=900)[0].items():
            found[f"{name}: {figure}"] = value
    return found
