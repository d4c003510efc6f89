"""Engines that compute with numbers of 8 bits: what a push gives them is each weight rounded block by
block, whatever the trainer's layout.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.rollout.engines.transformers import TransformersEngine, named_as_in_a_folder
from rftmega.weights import EngineWeights
from rftmega.weights.receivers.fp8 import quantised as as_pushed
from tests.block_scales import PLAIN, meant, quantised
from tests.layouts import build_manager
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
BLOCK = (128, 128)
TOO_HIGH = {"intermediate_size": 160}  # for one block


def pushed_body(world: Any, folder: Path, parallel: ParallelConfig) -> dict[str, Tensor]:
    manager = build_manager(folder, parallel)
    config = RolloutConfig(quantization="fp8")
    engine = TransformersEngine(folder, config, stop_ids=[1], where=torch.device("cpu"))
    EngineWeights(manager.shards(), engine, bucket_bytes=50_000).push(version=0)
    return {name: tensor.clone() for name, tensor in named_as_in_a_folder(engine.model).items()}


@pytest.mark.parametrize(
    ("variant", "size", "parallel"),
    [
        ("qwen3", 2, P(tensor=2)),
        ("qwen3-moe", 2, P(expert=2)),
        pytest.param("qwen3", 4, P(tensor=2, pipeline=2), marks=pytest.mark.ranks),
        pytest.param("qwen3-moe", 4, P(expert=2, tensor=2), marks=pytest.mark.ranks),
    ],
)
def test_every_engine_has_the_rounded_weights_bit_for_bit(
    variant: str, size: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant, **TOO_HIGH)
    disk = load_file(folder / "model.safetensors")
    wanted = {
        name: tensor
        if tensor.dim() < 2 or any(part in name for part in PLAIN)
        else meant(*quantised(tensor, BLOCK), BLOCK)
        for name, tensor in disk.items()
    }
    assert sum(not torch.equal(wanted[name], disk[name]) for name in disk) > 20
    for found in run_ranks(size, pushed_body, folder, parallel):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_loader_gets_numbers_of_a_byte_and_a_scale_a_block() -> None:
    weight = torch.randn(160, 130)
    given = [
        ("model.layers.0.mlp.up_proj.weight", weight),
        ("model.layers.0.self_attn.q_proj.bias", weight[0]),
        ("model.layers.0.mlp.gate.weight", weight),
        ("lm_head.weight", weight),
    ]
    (name, numbers), (scales_name, scales), *rest = as_pushed(given)
    assert (name, scales_name) == (given[0][0], given[0][0] + "_scale_inv")
    wanted, wanted_scales = quantised(weight, BLOCK)
    assert torch.equal(numbers.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales) and scales.shape == (2, 2)
    assert [(name, tensor is weight) for name, tensor in rest[1:]] == [
        ("model.layers.0.mlp.gate.weight", True),
        ("lm_head.weight", True),
    ]
