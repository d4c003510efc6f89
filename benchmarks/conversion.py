"""Measures the conversion of a Llama with 2 billion parameters in both directions: peak memory, and
time against `cp` of the same files.
"""

import json
import os
import resource
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import seconds
from rftmega.config import ParallelConfig
from rftmega.converters import instances, table
from rftmega.models.hf.hf_folder import PlannedTensor, shards_of, write_index, write_shard
from rftmega.run.conversion import convert
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
    """Writes random bf16 weights, shard by shard; returns their bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    planned = [
        PlannedTensor(name, torch.bfloat16, tuple(tensor.shape))
        for rule, layer, expert in instances(
            table(shape), layers=shape["num_hidden_layers"], experts=0
        )
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
    """Returns the seconds to copy the weights and flush them to disk, which a conversion also waits
    for.
    """
    target.mkdir()

    def work() -> None:
        for path in source.glob("*.safetensors"):
            shutil.copyfile(path, target / path.name)
            with (target / path.name).open("rb") as stream:
                os.fsync(stream.fileno())

    return seconds(work)


def both_ways(folder: Path, shape: dict[str, Any] = SHAPE, rounds: int = 3) -> dict[str, float]:
    """Measures copies and conversions alternately, each in memory that the previous one has just
    freed: a virtual machine takes several times as long for pages that it has not used recently.
    """
    found: dict[str, float] = {"gigabytes": write_model(folder / "hf", shape) / 1e9}
    for direction, begin, end in (("there", "hf", "megatron"), ("back", "megatron", "again")):
        copied, converted, peaks = [], [], []
        for _ in range(1 + rounds):  # the first is a warm-up
            shutil.rmtree(folder / end, ignore_errors=True)
            copied.append(copy(folder / "hf", folder / "copy"))
            shutil.rmtree(folder / "copy")
            said = run_ranks(1, body, direction, folder / begin, folder / end, timeout=900)[0]
            converted.append(said["seconds"])
            peaks.append(said["peak_gb"])
        ratios = [cp / ours for cp, ours in zip(copied[1:], converted[1:], strict=True)]
        found |= {
            f"{direction}_seconds": statistics.median(converted[1:]),
            f"{direction}_copy_seconds": statistics.median(copied[1:]),
            f"{direction}_over_copy_speed": statistics.median(ratios),
            f"{direction}_worst_over_copy_speed": min(ratios),
            f"{direction}_peak_gb": max(peaks),
        }
    return found | {
        "slower_over_copy_speed": min(found["there_over_copy_speed"], found["back_over_copy_speed"])
    }
