"""Each patch of the view of torch is needed: without it, unmodified megatron-core fails on a CPU."""

import json
import os
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftmega.config import ParallelConfig
from rftmega.runtime.device.torch_view import PATCHES, install
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

ROOT = Path(__file__).parents[2]
DENSE, TWO_STAGES = ParallelConfig(), ParallelConfig(pipeline=2)
SPREAD_EXPERTS = ParallelConfig(tensor=2, sequence=True, expert=2)
SHARED_EXPERTS = ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=2)
# Where a patch matters: (model, processes, layout). Two stages include tied embeddings.
NEEDED_BY = {
    "streams": ("qwen2-tied", 2, TWO_STAGES),
    "tensor_cuda": ("qwen2-tied", 2, TWO_STAGES),
    "split_sizes": ("qwen3-moe", 2, SPREAD_EXPERTS),
    "uneven": ("qwen3-moe", 4, SHARED_EXPERTS),
}
SAYS = ("cuda", "CUDA", "forked generators", "TypeError", "invalid tensor size")


def train(folder: Path, *, without: str, model: str, processes: int, layout: ParallelConfig) -> str:
    """What the ranks said."""
    save_tiny(folder / "model", model)
    script = Path(__file__).with_name("without_patch.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    described = json.dumps(asdict(layout))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), without, str(folder), str(rank), str(processes), described],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    return "\n".join(rank.communicate(timeout=120)[0] for rank in ranks)


# Megatron's version is pinned. With all patches, every other test of ranks trains.
@pytest.mark.ranks
@pytest.mark.parametrize("patch", PATCHES)
def test_without_a_patch_training_fails(patch: str, tmp_path: Path) -> None:
    model, processes, layout = NEEDED_BY.get(patch, ("qwen2-tied", 1, DENSE))
    said = train(tmp_path, without=patch, model=model, processes=processes, layout=layout)
    assert "trained" not in said
    assert any(words in said for words in SAYS), said


@pytest.mark.ranks
@pytest.mark.parametrize("case", [NEEDED_BY["streams"], NEEDED_BY["uneven"]])
def test_with_all_patches_training_works(
    case: tuple[str, int, ParallelConfig], tmp_path: Path
) -> None:
    model, processes, layout = case
    said = train(tmp_path, without="", model=model, processes=processes, layout=layout)
    assert said.count("trained") == processes, said


UNEVEN = [[3, 0, 2], [0, 0, 0], [1, 1, 1]]


def uneven_body(world: Any) -> list[Any]:
    return [uneven(world, sizes) for sizes in UNEVEN]


def uneven(world: Any, sizes: list[int]) -> Any:
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    group = dist.group.WORLD
    mine = torch.full((sizes[world.rank], 2), float(world.rank + 1), requires_grad=True)
    gathered = gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=sizes)
    scattered = reduce_scatter_to_sequence_parallel_region(
        gathered * (world.rank + 1), group=group, input_split_sizes=sizes
    )
    scattered.sum().backward()
    return gathered.detach(), scattered.detach(), mine.grad


def test_uneven_parts_are_gathered_and_reduced_as_nccl_would() -> None:
    for rank, found in enumerate(run_ranks(3, uneven_body)):
        for sizes, (gathered, scattered, grad) in zip(UNEVEN, found, strict=True):
            parts = [torch.full((size, 2), float(number + 1)) for number, size in enumerate(sizes)]
            assert torch.equal(gathered, torch.cat(parts)), sizes
            # the processes' factors: 1 + 2 + 3
            assert torch.equal(scattered, parts[rank] * 6), sizes
            assert torch.equal(grad, torch.full((sizes[rank], 2), 6.0)), sizes


def test_the_real_torch_is_left_alone() -> None:
    assert not install()  # a second call does nothing
    assert torch.cuda.current_device.__module__.startswith("torch.cuda")
    assert isinstance(torch.zeros, types.BuiltinFunctionType)
    assert "torch_view" not in getattr(torch.Tensor.type, "__module__", "")


def test_it_refuses_to_come_too_late() -> None:
    late = (
        "import sys\n"
        "sys.modules['megatron.core'] = sys  # importing it takes long\n"
        "from rftmega.runtime.device import torch_view\n"
        "torch_view.install()"
    )
    done = subprocess.run(
        [sys.executable, "-c", late], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "was imported before rftmega" in done.stderr
