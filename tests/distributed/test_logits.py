"""The model that Megatron computes is the model that transformers computes, under every layout."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rftmega.config import ParallelConfig
from tests.layouts import build_manager, packed_logits
from tests.ranks import run_ranks
from tests.tiny_models import VARIANTS, save_tiny, transformers_logits

LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {  # processes, layout
    "tp4": (4, ParallelConfig(tensor=4)),  # fewer key-value heads (2) than ranks
    "tp2-pp2-sp": (4, ParallelConfig(tensor=2, pipeline=2, sequence=True)),
}
MORE_LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "tp1": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2-pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "pp2-vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "pp2-first1": (2, ParallelConfig(pipeline=2, first_stage_layers=1)),
    "cp2": (2, ParallelConfig(context=2)),
    "tp2-cp2-sp": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
}
EXPERT_LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "ep2": (2, ParallelConfig(expert=2)),
    "tp2-ep2-sp": (2, ParallelConfig(tensor=2, expert=2, sequence=True)),
    "tp2-etp2-pp2-sp": (4, ParallelConfig(tensor=2, expert_tensor=2, pipeline=2, sequence=True)),
    "pp2-ep2": (4, ParallelConfig(pipeline=2, expert=2)),
}
ROWS = [[5, 9, 130, 2, 77], [3, 0], [int(x) for x in torch.arange(40) * 37 % 131], [1, 2, 3, 4, 5, 6]]


def logits_body(world, folder, parallel):
    manager = build_manager(folder, parallel)
    logits = packed_logits(manager, ROWS)
    dist.barrier()
    return logits


def assert_equal_to_transformers(variant: str, layouts: dict[str, tuple[int, ParallelConfig]], folder: Path) -> None:
    save_tiny(folder, variant)
    wanted = torch.cat([logits[:-1] for logits in transformers_logits(folder, ROWS)])
    for name, (processes, parallel) in layouts.items():
        found = [x for x in run_ranks(processes, logits_body, folder, parallel) if x is not None]
        assert found, name
        for logits in found:
            assert (logits - wanted).abs().max() < 1e-5, (variant, name, (logits - wanted).abs().max())


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    assert_equal_to_transformers(variant, LAYOUTS, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_those_of_transformers_under_the_other_layouts(variant: str, tmp_path: Path) -> None:
    has_experts = "moe" in variant or variant.startswith(("mixtral", "deepseek"))
    assert_equal_to_transformers(variant, MORE_LAYOUTS | (EXPERT_LAYOUTS if has_experts else {}), tmp_path)
