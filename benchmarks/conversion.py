"""Converting a Llama of 2 billion parameters both ways, in peak memory and against `cp` of the same files."""

import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import seconds
from converters import instances, table
from converters.hf_folder import Planned, shards_of, write_index, write_shard
from rftmega.checkpoint import convert
from rftmega.config import ParallelConfig
from tests.ranks import run_ranks

SHAPE = {
    "model_type": "llama",
    "vocab_size": 64000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, shape: dict[str, Any]) -> int:
    """Random bf16 weights, shard by shard; their bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    planned = [
        Planned(name, torch.bfloat16, tuple(tensor.shape))
        for rule, layer, expert in instances(table(shape), layers=shape["num_hidden_layers"], experts=0)
        for name, tensor in zip(rule.hf_names(layer, expert), rule.hf, strict=True)
    ]
    noise = torch.randn(max(tensor.bytes for tensor in planned) // 2).bfloat16()
    made = ((tensor.name, noise[: tensor.bytes // 2].view(tensor.shape)) for tensor in planned)
    shards = shards_of(planned, 2**30)
    for file, part in shards.items():
        write_shard(folder / file, part, made)
    write_index(folder, shards)
    return sum(tensor.bytes for tensor in planned)


def body(world: Any, direction: str, source: Path, target: Path) -> dict[str, float]:
    begin = time.perf_counter()
    if direction == "there":
        convert.to_megatron(source, target, ParallelConfig(tensor=2))
    else:
        convert.to_hf(source, target)
    return {
        "seconds": time.perf_counter() - begin,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def copy(source: Path, target: Path) -> float:
    """`cp` of the weights, and what it takes until they are on the disk, as a conversion waits for it, too."""
    target.mkdir()

    def work() -> None:
        import os

        for path in source.glob("*.safetensors"):
            shutil.copyfile(path, target / path.name)
            with (target / path.name).open("rb") as stream:
                os.fsync(stream.fileno())

    return seconds(work)


def both_ways(folder: Path, shape: dict[str, Any] = SHAPE) -> dict[str, float]:
    total = write_model(folder / "hf", shape)
    copies = [copy(folder / "hf", folder / "copy0")]
    shutil.rmtree(folder / "copy0")
    there = run_ranks(1, body, "there", folder / "hf", folder / "megatron", timeout=900)[0]
    copies.append(copy(folder / "hf", folder / "copy1"))
    shutil.rmtree(folder / "copy1")
    back = run_ranks(1, body, "back", folder / "megatron", folder / "back", timeout=900)[0]
    cp = sum(copies) / len(copies)
    return {
        "gigabytes": total / 1e9,
        "copy_seconds": cp,
        "to_megatron_seconds": there["seconds"],
        "to_hf_seconds": back["seconds"],
        "to_megatron_over_copy_speed": cp / there["seconds"],
        "to_hf_over_copy_speed": cp / back["seconds"],
        "slower_over_copy_speed": cp / max(there["seconds"], back["seconds"]),
        "to_megatron_peak_gb": there["peak_gb"],
        "to_hf_peak_gb": back["peak_gb"],
    }
