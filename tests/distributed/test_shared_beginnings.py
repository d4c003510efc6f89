"""Value models compute a beginning once, too, and so do updates that give the log-probs before them
and have teachers; tests/invariance.py has other policies.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.values import value_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience, Rows
from rftmega.run.built_backend import built_backend
from tests.invariance import PROMPTS, ROWS, TAUGHT, Layout, begun_alike, saved, taught, teachers_of
from tests.layouts import build_value_model, config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny


def experience_of(rows: Rows, logp: Tensor, advantage: Tensor, **columns: Any) -> Experience:
    """`logp`: of the engine and of the policy before the update."""
    return Experience(
        tokens=rows.tokens,
        prompt_lengths=rows.prompt_lengths,
        lengths=rows.lengths,
        mask=rows.mask,
        behaviour_logp=logp,
        old_logp=logp,
        reference_logp=None,
        advantage=advantage,
        **columns,
    )


def values_body(world: Any, folder: Path, backend: str, tensor: int) -> list[list[Tensor]]:
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
        experience = experience_of(rows, nothing, nothing, old_value=before, returns=returns)
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


def taught_body(
    world: Any, folder: Path, backend: str, tensor: int
) -> list[tuple[list[int], Tensor, Tensor]]:
    """Log-probs of all tokens and metrics of an update with a teacher, without shared beginnings and
    with them; the first of equal rows is truncated, so that it is not trained on.
    """
    rows = begun_alike(rows_of(ROWS, PROMPTS))
    seen: set[tuple[int, ...]] = set()
    keep = []
    for tokens in rows.tokens.tolist():
        keep.append(tuple(tokens) in seen)
        seen.add(tuple(tokens))
    keep[-1] = True
    assert 1 < sum(keep) < len(keep)
    rows = replace(rows, mask=rows.mask & torch.tensor(keep)[:, None])
    torch.manual_seed(5)
    old = -3 * torch.rand(rows.mask.shape)
    found = []
    for shares in (False, True):
        layout = Layout(tensor, ParallelConfig(tensor=tensor), backend=backend, shares=shares)
        config = config_of(
            folder,
            layout.parallel,
            OptimizerConfig(learning_rate=1e-2, epsilon=1e-4),
            backend=backend,
            token_cap=300,
            share_prefixes=shares,
        )
        config.algorithm.drop_truncated = True
        config.algorithm.teachers = teachers_of(folder / "teacher", layout)
        builder = built_backend(config)
        actor = builder.policy(config)
        experience = experience_of(rows, old, 1.0 * rows.mask).ragged()
        order = torch.arange(len(rows))
        experience = taught(experience, config, builder, actor, world, order)
        weights = {"full": 0.5, "top": 1.0}
        told: list[Any] = []
        metrics = actor.step(experience, policy_loss(teachers=weights), scored=told.append)
        (stats,) = told
        numbers = [
            metrics[each] for each in ("loss", "grad_norm", "full_divergence", "top_divergence")
        ]
        found.append((keep, torch.tensor(numbers), stats.logp.flat))
    return found


@pytest.mark.parametrize(("backend", "tensor"), [("megatron", 2), ("fsdp", 1)])
def test_teachers_teach_every_trained_row_where_equal_ones_are_not_trained_on(
    backend: str, tensor: int, tmp_path: Path
) -> None:
    folder = saved(tmp_path, TAUGHT)
    for alone, shared in run_ranks(tensor, taught_body, folder, backend, tensor):
        assert float(alone[1].abs().min()) > 1e-3
        for one, other in zip(shared[1:], alone[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
