"""The learning rate of every optimizer step of a run, first to last, against the formula of its
schedule.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.backends.megatron import MegatronActor, MegatronCritic
from rftmega.config import CriticConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from rftmega.config.options.algorithms import GAE
from rftmega.core.types import Experience
from rftmega.runtime.parallel.topology import Topology
from tests.layouts import config_of, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

STEPS, MINI_BATCHES, WARM, PEAK, LOWEST = 4, 3, 2, 1e-3, 1e-4
FROZEN = 1  # steps of the policy


def config(folder: Path, schedule: str) -> Any:
    optimizer = OptimizerConfig(
        learning_rate=PEAK, min_learning_rate=LOWEST, schedule=schedule, warmup_steps=WARM
    )
    found = config_of(folder, ParallelConfig(), optimizer, updates_per_epoch=MINI_BATCHES)
    algorithm = replace(found.algorithm, advantage=GAE())
    return replace(
        found,
        trainer=TrainerConfig(steps=STEPS, max_tokens_per_micro_batch=64),
        algorithm=algorithm,
        critic=CriticConfig(warmup_steps=FROZEN),
    )


def rates_body(world: Any, folder: Path, schedule: str) -> list[float]:
    """Of each optimizer step that the policy takes."""
    chosen = config(folder, schedule)
    actor = MegatronActor(chosen, Topology.create(chosen.parallel, seed=1))
    rows = rows_of([[1, 2, 3], [4, 5], [6, 7, 8]])
    zero = torch.zeros(rows.mask.shape)
    experience = Experience(
        rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, zero, zero, None, zero + 1
    )
    return [
        actor.step(experience, policy_loss())["learning_rate"]
        for _ in range((STEPS - FROZEN) * MINI_BATCHES)
    ]


def planned_body(world: Any, folder: Path) -> int:
    """Optimizer steps that the critic's decay is spread over."""
    chosen = config(folder, "linear")
    return MegatronCritic(
        chosen, Topology.create(chosen.parallel, seed=1)
    ).manager.lr_scheduler.lr_decay_steps


def by_hand(schedule: str, step: int, steps: int) -> float:
    """Of optimizer step 1, 2, ... of so many: the peak after the warm-up, and the lowest where the
    next step would be.
    """
    if step <= WARM:
        return PEAK * step / WARM
    gone = (step - WARM) / (steps + 1 - WARM)
    shape = {"constant": 1.0, "linear": 1 - gone, "cosine": (math.cos(math.pi * gone) + 1) / 2}[
        schedule
    ]
    return LOWEST + shape * (PEAK - LOWEST)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_each_optimizer_step_has_the_rate_of_its_schedule_down_to_the_last(
    schedule: str, tmp_path: Path
) -> None:
    (rates,) = run_ranks(1, rates_body, save_tiny(tmp_path, "qwen3"), schedule)
    steps = (STEPS - FROZEN) * MINI_BATCHES
    assert len(rates) == steps
    assert rates == pytest.approx([by_hand(schedule, step, steps) for step in range(1, steps + 1)])
    if schedule == "linear":
        assert rates[-1] == pytest.approx(LOWEST + (PEAK - LOWEST) / (steps + 1 - WARM)), (
            "one step from the lowest"
        )


def test_the_critics_schedule_counts_the_steps_in_which_the_policy_is_frozen(
    tmp_path: Path,
) -> None:
    (planned,) = run_ranks(1, planned_body, save_tiny(tmp_path, "qwen3"))
    assert planned == STEPS * MINI_BATCHES + 1
