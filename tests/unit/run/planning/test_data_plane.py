"""Bytes of a rollout on paper, against those that a rollout has."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from rftmega.config import AlgorithmConfig, KLConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.config.options.algorithms import GAE, GroupNorm, ReplayConfig
from rftmega.core.ragged import Ragged
from rftmega.core.types import Completion, Prompt, TokenStats, TokenValues
from rftmega.model_providers.description import Experts
from rftmega.run.planning.data_plane import on_each_host, tokens_of
from rftmega.trainer.experience import ExperienceMaker, collect
from tests.rollouts import rollout_of

PROMPT, COMPLETION, SIBLINGS = 3, 5, 2


class Models:
    def log_probs(self, rows: Any, *, temperature: float | None = None) -> Any:
        x = torch.zeros(rows.padded().mask.shape)
        return rows.like(TokenStats(x, x.clone()))

    reference_log_probs = log_probs

    def values(self, rows: Any) -> Any:
        return rows.like(TokenValues(torch.zeros(rows.padded().mask.shape))).value


def bytes_of(samples: Any, experience: Any) -> int:
    """All memory behind the columns, each once."""
    found: dict[int, int] = {}
    for batch in (samples.rows, samples, experience):
        for each in fields(batch):
            column = getattr(batch, each.name)
            if isinstance(column, Ragged):
                storage = column.values.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("experts", [None, 60, 384])
def test_routes_take_a_byte_an_expert_or_two(experts: int | None) -> None:
    config = RunConfig(rollout=RolloutConfig(router_replay="engine"))
    moe = experts and Experts(experts, 8, 16, frozenset(range(1, 48)), normalised=True)
    more = on_each_host(config, moe or None)["rollout"] - on_each_host(config)["rollout"]
    size = {None: 0, 60: 1, 384: 2}[experts]
    assert more == tokens_of(config) * 47 * 8 * size
    assert on_each_host(RunConfig(), moe or None) == on_each_host(RunConfig())


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(advantage=GroupNorm()),
        AlgorithmConfig(advantage=GroupNorm(), kl=KLConfig(coef=0.1)),
        AlgorithmConfig(advantage=GAE(), kl=KLConfig(coef=0.1), drop_truncated=True),
    ],
)
def test_a_rollout_takes_as_many_bytes_as_is_said(algorithm: AlgorithmConfig) -> None:
    """Without the last target of each row, which there is not."""
    config = RunConfig(
        algorithm=algorithm,
        rollout=RolloutConfig(
            samples_per_prompt=SIBLINGS, max_prompt_tokens=PROMPT, max_response_tokens=COMPLETION
        ),
        trainer=TrainerConfig(prompts_per_step=4),
    )
    prompts = [Prompt((1,) * PROMPT) for _ in range(8)]
    completion = Completion((2,) * COMPLETION, (-1.0,) * COMPLETION, "length", 0)
    rollouts = [rollout_of(prompt, completion) for prompt in prompts]
    samples = collect(prompts, rollouts, lambda *_: [{"reward": 1.0}] * 8, samples_per_prompt=2)
    models: Any = Models()
    critic = models if algorithm.advantage.needs_critic else None
    experience = ExperienceMaker(models, algorithm, critic=critic).make(samples)
    planned = on_each_host(config)
    completions = 13 * 8 * (PROMPT + COMPLETION)
    numbers = planned["rollout"] - completions
    share = (PROMPT + COMPLETION - 1) / (PROMPT + COMPLETION)
    assert bytes_of(samples, experience) == completions + numbers * share


def test_a_replay_holds_what_it_keeps_and_what_is_trained_from() -> None:
    algorithm = AlgorithmConfig(replay=ReplayConfig(max_age=2, max_rows=20))
    config = RunConfig(
        algorithm=algorithm,
        rollout=RolloutConfig(
            samples_per_prompt=SIBLINGS, max_prompt_tokens=PROMPT, max_response_tokens=COMPLETION
        ),
        trainer=TrainerConfig(prompts_per_step=8),
    )
    planned = on_each_host(config)
    a_row = planned["rollout"] // 16
    assert planned["replay"] == a_row * (20 + 20 + 16), "kept, and joined with the step's own"
    config.algorithm.replay.max_rows = 0
    assert on_each_host(config)["replay"] == a_row * (32 + 32 + 16)


def test_what_has_no_rollouts_holds_none() -> None:
    assert on_each_host(RunConfig(algorithm=AlgorithmConfig(task="sft"))) == {}
