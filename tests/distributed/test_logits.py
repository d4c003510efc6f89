"""The model that Megatron computes is the model that transformers computes, under every layout."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rftmega.config import ParallelConfig
from tests.layouts import build_manager, packed_logits
from tests.ranks import run_ranks
from tests.tiny_models import VARIANTS, save_tiny, transformers_logits

LAYOUTS = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "tp4": ParallelConfig(tensor=4),  # fewer key-value heads (2) than ranks
    "tp2-pp2": ParallelConfig(tensor=2, pipeline=2),
    "tp2-pp2-sp": ParallelConfig(tensor=2, pipeline=2, sequence=True),
}
ROWS = [[5, 9, 130, 2, 77], [3, 0], [int(x) for x in torch.arange(40) * 37 % 131], [1, 2, 3, 4, 5, 6]]


def logits_body(world, folder, parallel):
    manager = build_manager(folder, parallel)
    logits = packed_logits(manager, ROWS)
    dist.barrier()
    return logits


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    wanted = torch.cat([logits[:-1] for logits in transformers_logits(folder, ROWS)])
    for name, parallel in LAYOUTS.items():
        world = parallel.tensor * parallel.pipeline
        found = [x for x in run_ranks(world, logits_body, folder, parallel) if x is not None]
        assert found, name
        for logits in found:
            assert (logits - wanted).abs().max() < 1e-5, (variant, name, (logits - wanted).abs().max())
