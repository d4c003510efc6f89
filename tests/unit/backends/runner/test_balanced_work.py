from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.backends.fsdp.runner import FSDPRunner
from rftmega.backends.megatron.model_runner import MegatronRunner
from rftmega.backends.runner.flops import head_cost, media_costs, row_cost
from rftmega.config import ParallelConfig
from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.core.types import Rows, TokenStats, TokenValues
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.runtime.device.spans import recorder
from tests.layouts import config_of
from tests.tiny_models import save_tiny
from tests.tiny_vision import save_tiny_vision
from tests.unit.backends.runner.test_shared_beginnings import Runner, runner_of


def rows_of_lengths(lengths: list[int], predicted: list[int]) -> Rows:
    """Random rows; the last `predicted` tokens of each are trained on."""
    tokens = torch.randint(100, (len(lengths), max(lengths)))
    whole = torch.tensor(lengths)
    return Rows.of_completions(tokens, whole - torch.tensor(predicted), whole)


@pytest.mark.parametrize("masked", [False, True])
def test_processes_get_equal_work_in_layers_and_head(masked: bool, tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, "qwen3"), ParallelConfig(), token_cap=400)
    runner = runner_of(config, 2)
    model = runner.stepped.description
    lengths, predicted = [90, 30, 30, 30, 60], [1, 29, 29, 29, 3]
    recorder.measuring = True
    recorder.take()
    runner._micro_batches(rows_of_lengths(lengths, predicted), passes=3, masked=masked)
    counted = recorder.take()
    recorder.measuring = False
    heads = predicted if masked else [length - 1 for length in lengths]
    costs = [
        row_cost(model)(length) + head_cost(model) * head
        for length, head in zip(lengths, heads, strict=True)
    ]
    assert counted["balanced"] == pytest.approx(3 * sum(costs) / 2)
    splits = [sum(costs[row] for row in range(5) if code >> row & 1) for code in range(32)]
    best = min(max(one, sum(costs) - one) for one in splits)
    assert 3 * best <= counted["slowest"] + 1e-6 <= 3 * 1.02 * best


def test_a_value_model_has_no_lm_head_to_compute(tmp_path: Path) -> None:
    runner = runner_of(config_of(save_tiny(tmp_path, "qwen3"), ParallelConfig()))
    rows = rows_of_lengths([20, 30], [5, 6])
    critic = Runner(runner.stepped, runner.ranks, TokenValues)
    assert critic._costs_beside(rows, 3, False) == [0.0, 0.0]
    assert runner._costs_beside(rows, 3, True)[0] > 0


@pytest.mark.parametrize(("frozen", "share"), [(False, 1.0), (True, 1 / 3)])
def test_a_frozen_vision_encoder_has_no_backward_pass(
    frozen: bool, share: float, tmp_path: Path
) -> None:
    config = config_of(save_tiny_vision(tmp_path, "qwen2_5_vl"), ParallelConfig())
    config.model.freeze_vision = frozen
    runner = runner_of(config)
    model = runner.stepped.description
    image = PlacedImage("x", digest="x", grid=(1, 8, 4), start=0, tokens=8)
    images = RowImages(((image, image), ()))
    rows = rows_of_lengths([20, 30], [5, 6])
    found = runner._costs_beside(replace(rows, images=images), 3, True)
    head = head_cost(model)
    assert found == pytest.approx([5 * head + share * media_costs(model, images)[0], 6 * head])


@pytest.mark.parametrize(("expert", "lockstep"), [(1, False), (2, True)])
def test_experts_on_several_processes_let_these_meet_in_every_micro_batch(
    expert: int, lockstep: bool, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe")
    manager: Any = SimpleNamespace(
        cfg=config_of(folder, ParallelConfig(expert=expert)),
        topology=SimpleNamespace(pipeline=1, context=1),
        model=[None],
        where=torch.device("cpu"),
        dtype=torch.float32,
        description=describe(read_hf_config(folder)),
    )
    assert MegatronRunner(manager, TokenStats, None).lockstep is lockstep
    assert FSDPRunner.lockstep
