"""Muon of Megatron-Core over a stand-in of the package that it needs (tests/stub_muon.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.runtime.device.residency import ADAM, PARTS
from tests import stub_muon
from tests.distributed.test_checkpoints import TOKENS, actor_of, kept_by, learn
from tests.plain_loop import log_probs
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
MUON = OptimizerConfig(
    name="muon", learning_rate=1e-2, epsilon=1e-4, clip_grad=0.0, weight_decay=0.1
)
MOMENTUM, STEPS, SAVED = 0.95, 4, 2
TOGETHER = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")


def orthogonal(matrix: Tensor) -> Tensor:
    """Keller Jordan's five steps of Newton and Schulz, in float64."""
    x = matrix.double() / (matrix.double().norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return (x * max(matrix.shape) ** 0.5).float()


def plain_losses(folder: Path) -> list[float]:
    """Losses of steps by Muon on whole matrices of Hugging Face, and by AdamW on the rest."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    layers = model.model.layers
    matrices = [
        [parameter]
        for layer in layers
        for name, parameter in layer.named_parameters()
        if name.split(".")[-2] in TOGETHER and parameter.dim() == 2
    ]
    # Megatron keeps both as one matrix
    matrices += [[layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight] for layer in layers]
    ours = {id(parameter) for group in matrices for parameter in group}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in ours]
    groups = [
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": 0.1},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    momenta = [torch.zeros_like(torch.cat(group)) for group in matrices]
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = -torch.cat(log_probs(model, TOKENS)).mean()
        loss.backward()
        losses.append(float(loss))
        adam.step()
        with torch.no_grad():
            for group, momentum in zip(matrices, momenta, strict=True):
                slope = torch.cat([parameter.grad for parameter in group])
                momentum.mul_(MOMENTUM).add_((1 - MOMENTUM) * slope)
                step = orthogonal((1 - MOMENTUM) * slope + MOMENTUM * momentum)
                for parameter, part in zip(group, step.split([len(p) for p in group]), strict=True):
                    parameter.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * part)
    return losses


def learn_body(world: Any, model: Path, parallel: ParallelConfig) -> list[float]:
    stub_muon.install()
    actor = actor_of(model, parallel, MUON, "float32", 0.0)
    found = []
    for _ in range(STEPS):
        found += learn(actor, 1)
        actor.residency.only()
        assert actor.residency.bytes()[ADAM] == 0
        actor.residency.only(*PARTS)
    return found


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(1, P(), marks=pytest.mark.ranks, id="one process"),
        pytest.param(2, P(tensor=2), id="TP2"),
        pytest.param(2, P(pipeline=2), marks=pytest.mark.ranks, id="PP2"),
        pytest.param(2, P(), marks=pytest.mark.ranks, id="DP2"),
    ],
)
def test_whole_matrices_are_stepped_alike_under_every_layout(
    ranks: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, "qwen3")
    wanted = plain_losses(model)
    assert wanted[-1] < wanted[0] - 0.1
    assert run_ranks(ranks, learn_body, model, parallel)[0] == pytest.approx(wanted, rel=1e-5)


def save_body(world: Any, model: Path, folder: Path, parallel: ParallelConfig) -> list[float]:
    stub_muon.install()
    actor = actor_of(model, parallel, MUON, "bfloat16", 0.0)
    learn(actor, SAVED)
    kept_by(actor, folder).save({}, step=SAVED)
    return learn(actor, STEPS)


def resume_body(world: Any, model: Path, folder: Path, parallel: ParallelConfig) -> list[float]:
    stub_muon.install()
    actor = actor_of(model, parallel, MUON, "bfloat16", 0.0)
    assert kept_by(actor, folder).resume() is not None
    assert actor.counters()["adam_steps"] == SAVED
    return learn(actor, STEPS)


def test_a_run_with_muon_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, folder = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "kept"
    expected, *_ = run_ranks(2, save_body, model, folder, P(tensor=2))
    assert run_ranks(2, resume_body, model, folder, P(tensor=2))[0] == expected
    assert len(set(expected)) == STEPS
