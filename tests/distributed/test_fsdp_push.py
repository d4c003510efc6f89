"""The push of a model on FSDP2: engines get what their loaders read, and each element that a
process needs and does not hold is moved once.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rftmega.config import ParallelConfig
from rftmega.core.shards import Shard
from rftmega.weights import EngineWeights
from tests.block_engine import BlockEngine
from tests.layouts import build_policy
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
LAYOUTS = {
    "FSDP 2 to engines of 1": ("qwen3", 2, P(), 1, "float32"),
    "FSDP 2 to an engine of 2": ("qwen3", 2, P(), 2, "float32"),
    "FSDP 3 to engines of 1": ("qwen3-moe", 3, P(), 1, "float32"),
    "FSDP 4 to engines of 2": ("qwen3", 4, P(), 2, "bfloat16"),
    "FSDP 4 to an engine of 4": ("qwen3", 4, P(), 4, "float32"),
    "tied, FSDP 4 to engines of 2": ("qwen2-tied", 4, P(), 2, "float32"),
    "replicas, to engines of 2": ("qwen3", 4, P(replicas=2), 2, "float32"),
    "replicas, to an engine of 4": ("qwen2-tied", 4, P(replicas=2), 4, "bfloat16"),
    "experts, FSDP 4 to engines of 2": ("qwen3-moe", 4, P(), 2, "bfloat16"),
    "FSDP 2 x TP2 to engines of 2": ("qwen3", 4, P(tensor=2), 2, "float32"),
    "FSDP 1 x TP2 to engines of 1": ("llama", 2, P(tensor=2), 1, "bfloat16"),
    "tied, 2 replicas x TP2 to an engine of 4": (
        "qwen2-tied",
        4,
        P(tensor=2, replicas=2),
        4,
        "float32",
    ),
    "experts, FSDP 2 x TP2 to engines of 2": ("qwen3-moe", 4, P(tensor=2), 2, "float32"),
    "on the host, FSDP 2 to an engine of 2": ("qwen3-moe", 2, P(cpu_offload=True), 2, "float32"),
}
FEW = [
    "FSDP 3 to engines of 1",
    "replicas, to an engine of 4",
    "experts, FSDP 2 x TP2 to engines of 2",
    "on the host, FSDP 2 to an engine of 2",
]


def held_elements(shards: list[Shard], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Which elements of each tensor this process has, one by one."""
    found = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for shard in shards:
        for number, name in enumerate(shard.logical.names):
            for box, _ in shard.views(number):
                found[name][tuple(slice(*edges) for edges in box)] = True
    return found


def least_moved(shards: list[Shard], engine: BlockEngine, disk: dict[str, Tensor]) -> int:
    """Elements that this process's engine reads and that the process does not have."""
    held = held_elements(shards, {name: tensor.shape for name, tensor in disk.items()})
    missing = 0
    for name, tensor in disk.items():
        numbers = torch.arange(tensor.numel()).view(tensor.shape)
        needed = engine.block(name, numbers).flatten()
        missing += int((~held[name].flatten()[needed]).sum())
    return missing


def push_body(world: Any, folder: Path, parallel: ParallelConfig, ranks: int, dtype: str) -> Any:
    actor = build_policy(folder, parallel, backend="fsdp", dtype=dtype)
    kind = getattr(torch, dtype)
    disk = load_file(folder / "model.safetensors")
    actor.residency.finish()
    shards = list(actor.shards())
    oracle = torch.tensor(least_moved(shards, BlockEngine(world.rank % ranks, ranks), disk))
    dist.all_reduce(oracle)
    for bucket_bytes in (2**30, 10_000):
        engine = BlockEngine(world.rank % ranks, ranks)
        weights = EngineWeights(shards, engine, bucket_bytes=bucket_bytes)
        metrics = weights.push(version=1)
        assert engine.loaded.keys() == disk.keys()
        for name, tensor in disk.items():
            assert torch.equal(engine.loaded[name], engine.block(name, tensor.to(kind))), name
    return metrics["push_bytes"], int(oracle) * kind.itemsize


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.ranks) for name in LAYOUTS],
)
def test_each_element_that_is_needed_elsewhere_is_moved_once(name: str, tmp_path: Path) -> None:
    variant, processes, *case = LAYOUTS[name]
    for moved, least in run_ranks(processes, push_body, save_tiny(tmp_path, variant), *case):
        assert moved == least > 0
