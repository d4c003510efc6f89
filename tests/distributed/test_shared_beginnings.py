"""Value models compute a beginning once, too; tests/invariance.py has policies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.values import value_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience
from tests.invariance import PROMPTS, ROWS, begun_alike
from tests.layouts import build_value_model, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny


def values_body(world: Any, folder: Path, backend: str, tensor: int) -> list[list[torch.Tensor]]:
    """Values and the loss of two updates, without shared beginnings and with them."""
    rows = begun_alike(rows_of(ROWS, PROMPTS))
    torch.manual_seed(5)
    returns = torch.randn(rows.mask.shape)
    found = []
    for shares in (False, True):
        critic = build_value_model(
            folder,
            ParallelConfig(tensor=tensor),
            OptimizerConfig(learning_rate=1e-2, epsilon=1e-4),
            backend=backend,
            token_cap=300,
            share_prefixes=shares,
        )
        before = critic.values(rows)
        nothing = torch.zeros_like(returns)
        experience = Experience(
            tokens=rows.tokens,
            prompt_lengths=rows.prompt_lengths,
            lengths=rows.lengths,
            mask=rows.mask,
            behaviour_logp=nothing,
            old_logp=nothing,
            reference_logp=None,
            advantage=nothing,
            old_value=before,
            returns=returns,
        )
        steps = [critic.step(experience, value_loss()) for _ in range(2)]
        numbers = torch.tensor([[each["loss"], each["grad_norm"]] for each in steps])
        found.append([before, numbers, critic.values(rows)])
    return found


@pytest.mark.parametrize(("backend", "tensor"), [("megatron", 2), ("fsdp", 1)])
def test_a_critic_learns_the_same_where_beginnings_are_computed_once(
    backend: str, tensor: int, tmp_path: Path
) -> None:
    for alone, shared in run_ranks(
        tensor, values_body, save_tiny(tmp_path, "qwen3"), backend, tensor
    ):
        assert (shared[2] - shared[0]).abs().max() > 0.1, "something was learnt"
        for one, other in zip(shared, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
