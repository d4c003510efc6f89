"""A reward model on Megatron: its score is transformers', and pairs stay together under every
layout.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rftmega.algorithms.supervised import last_value, pairwise_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.trainer.experience import given
from rftmega.trainer.optimizer_steps import Schedule, take_steps
from tests.distributed.test_critic import save_reward_model
from tests.layouts import build_critic, rows_of
from tests.ranks import run_ranks

PAIRS = [
    [5, 9, 130, 2, 77],
    [5, 9, 4],
    [(37 * i) % 131 for i in range(30)],
    [0, 3, 6],
    [8, 1],
    [8, 7, 7],
    [1, 2, 3],
    [1, 2, 0],
]
PROMPTS = [2, 2, 1, 1, 1, 1, 2, 2]
OPTIMIZER = OptimizerConfig(epsilon=1e-4, learning_rate=2e-4, clip_grad=0.5)
P = ParallelConfig
LAYOUTS = {"DP2": (2, P()), "PP2": (2, P(pipeline=2)), "CP2": (2, P(context=2))}


def learn_body(world: Any, folder: Path, parallel: ParallelConfig, token_cap: int) -> Any:
    """Mini-batches of 2, 1 and 1 pairs; with a cap of 36 tokens the first is two micro-batches."""
    critic = build_critic(folder, parallel, OPTIMIZER, token_cap=token_cap, updates_per_epoch=3)
    rows = rows_of(PAIRS, PROMPTS).with_end()
    before = last_value(critic.values(rows), rows)
    cut = Schedule(3).mini_batches(torch.full((len(rows) // 2,), 2), 0)
    metrics = take_steps(critic, given(rows), pairwise_loss(), cut, group_size=2)
    return before, metrics, last_value(critic.values(rows), rows)


def test_scores_are_those_of_transformers_and_a_step_is_the_same_under_every_layout(
    tmp_path: Path,
) -> None:
    folder = save_reward_model(tmp_path, "qwen3", bias=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in PAIRS])
    before, metrics, after = run_ranks(1, learn_body, folder, P(), 10_000)[0]
    torch.testing.assert_close(before, wanted, atol=1e-5, rtol=1e-5)
    assert metrics["count"] == pytest.approx(4 / 3)
    for name, (processes, parallel) in LAYOUTS.items():
        for found in run_ranks(processes, learn_body, folder, parallel, 36):
            torch.testing.assert_close(
                found[0], before, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
            torch.testing.assert_close(
                found[2], after, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert found[1] == pytest.approx(metrics, rel=1e-5, abs=1e-6), name
