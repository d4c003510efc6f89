"""Supervised learning on Megatron: loss and gradient are transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.data.supervised import Example, rows_of
from rftmega.trainer.experience import given
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

EXAMPLES = [
    Example((5, 9), (130, 2, 77)),
    Example((3,), (0,)),
    Example(tuple(range(20)), (7,) * 9),
    Example((1, 2), (3, 4)),
]


def learn_body(world: Any, folder: Path) -> Any:
    actor = build_actor(folder, ParallelConfig(), OptimizerConfig(clip_grad=0.0), token_cap=30)
    return actor.step(given(rows_of(EXAMPLES)), cross_entropy_loss())


def test_a_step_has_the_loss_and_the_gradient_of_transformers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = sum(len(example.response_ids) for example in EXAMPLES)
    total = torch.zeros(())
    for example in EXAMPLES:
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        labels = ids.clone()
        labels[:, : len(example.prompt_ids)] = -100  # transformers' mark of what is not learnt
        total = total + model(ids, labels=labels).loss * len(example.response_ids) / tokens
    total.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    for metrics in run_ranks(2, learn_body, folder):
        assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
        assert metrics["cross_entropy"] == metrics["loss"]
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["count"] == tokens
