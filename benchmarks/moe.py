"""Measures the push of a MoE with as many tensors as Qwen3-30B-A3B, but tiny ones: the remaining
time is Python's.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from rftmega.backends.megatron.binding import Bound
from rftmega.config import RolloutConfig
from rftmega.converters import shard_shape, table
from rftmega.converters.rules import instances
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.runtime import device
from rftmega.weights import EngineWeights
from rftmega.weights.replay import ReceivedFill
from tests.fused_engine import FusedEngine
from tests.ranks import run_ranks

BUCKET_BYTES = 256 * 2**20
ROUNDS = 5


def save_config(folder: Path, *, layers: int = 48, experts: int = 128) -> Path:
    """Writes a config with Qwen3-30B-A3B's layers and experts, of the least width that vLLM's CPU
    kernels support.
    """
    fields: dict[str, Any] = {"head_dim": 32}  # not a parameter of the class
    Qwen3MoeConfig(
        **fields,
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=256,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder


def parameters_of(folder: Path, rank: int, ranks: int) -> list[Bound]:
    """Returns a trainer's share of the MoE, without a trainer: experts distributed over the
    processes, everything else replicated.
    """
    config = read_hf_config(folder)
    model = describe(config)
    experts = model.experts.number if model.experts else 0
    where = device.current().here()
    return [
        Bound(
            rule,
            layer,
            expert,
            torch.randn(shard_shape(rule, 0, 1), dtype=torch.bfloat16, device=where),
            0,
            1,
        )
        for rule, layer, expert in instances(table(config), layers=model.layers, experts=experts)
        if expert is None or expert * ranks // experts == rank
    ]


def processor_seconds(work: Any) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


@contextmanager
def copying_nothing() -> Iterator[None]:
    """Disables the copies of vLLM's reload within a `with` block; its layers are still built and
    repacked.
    """
    plain = ReceivedFill.into

    def counted(self: ReceivedFill, parameter: torch.Tensor) -> None:
        if parameter.is_meta:
            plain(self, parameter)
        self.done = True

    ReceivedFill.into = counted  # type: ignore[method-assign]
    yield
    ReceivedFill.into = plain  # type: ignore[method-assign]


def measured(world: Any, held: Sequence[Bound], engine: Any) -> dict[str, float]:
    """Measures the CPU time per tensor of a push by the engine's own loader, and of one that
    replays the recorded copies.
    """
    made: list[EngineWeights] = []
    shards = [item.shard() for item in held]
    plan = processor_seconds(
        lambda: made.append(EngineWeights(shards, engine, bucket_bytes=BUCKET_BYTES))
    )
    (weights,) = made
    versions = count()
    tensors = sum(len(tensor.names) for bucket in weights.buckets for tensor in bucket.tensors)

    def a_tensor() -> float:
        found = [
            processor_seconds(lambda: weights.push(version=next(versions))) for _ in range(ROUNDS)
        ]
        return sorted(found)[ROUNDS // 2] / tensors * 1e6

    first = processor_seconds(lambda: weights.push(version=next(versions))) / tensors * 1e6
    copied = a_tensor()
    with copying_nothing():
        engines = a_tensor()
    recording, weights.recording = weights.recording, None
    by_loader = a_tensor()
    weights.recording = recording
    moved = weights.push(version=next(versions))["push_bytes"]
    return {
        "tensors": float(tensors),
        "moved_mib": moved / 2**20,
        "plan_seconds": plan,
        "first_push_us_a_tensor": first,
        "by_the_loader_us_a_tensor": by_loader,
        "push_us_a_tensor": copied,
        "of_it_the_engines_own_us": engines,
        "push_less_the_engines_own_us": copied - engines,
    }


def in_vllm(world: Any, folder: Path) -> dict[str, float]:
    from rftmega.rollout.engines.vllm import VLLMEngine

    config = RolloutConfig(
        max_prompt_tokens=32, max_response_tokens=12, cpu_cache_gib=0.05, max_batch=8
    )
    engine = VLLMEngine(folder, config, world, dtype="bfloat16", stop_ids=[1])
    found = measured(world, parameters_of(folder, world.rank, world.size), engine)
    dist.barrier()
    engine.close()
    return found


def in_plain_parameters(world: Any, folder: Path) -> dict[str, float]:
    """Measures an engine with vLLM's parameters whose loader does nothing else: no counting, no
    repacking.
    """
    held = parameters_of(folder, world.rank, world.size)
    everything = parameters_of(folder, 0, 1)
    shapes = {
        name: tensor.shape
        for item in everything
        for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)
    }  # fmt: skip
    return measured(world, held, FusedEngine(0, 1, shapes, dtype=torch.bfloat16))


def many_tensors(folder: Path) -> dict[str, float]:
    save_config(folder)
    found = {}
    for name, processes, body in (
        ("plain parameters", 1, in_plain_parameters),
        ("plain parameters, experts over 2 processes", 2, in_plain_parameters),
        ("vLLM", 1, in_vllm),
    ):
        for figure, value in run_ranks(processes, body, folder, timeout=900)[0].items():
            found[f"{name}: {figure}"] = value
    return found
