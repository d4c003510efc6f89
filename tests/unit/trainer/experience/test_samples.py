from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rftmega.config import AlgorithmConfig, KLConfig
from rftmega.config.options.algorithms import GroupNorm
from rftmega.core.types import Completion, Prompt, Rollout, TokenStats
from rftmega.trainer.experience import ExperienceMaker, collect
from tests.rollouts import rollout_of

PROMPTS = [Prompt((1, 2, 3)), Prompt((1, 2, 3)), Prompt((9,)), Prompt((9,))]
COMPLETIONS = [
    # 0 is a padding id too: masks must not come from tokens
    Completion((0, 0), (-0.1, -0.2), "stop", 0),
    Completion((4, 5, 6), (-0.3, -0.4, -0.5), "length", 0),
    Completion((), (), "length", 0),
    Completion((8,), (-0.6,), "stop", 0),
]
ROLLOUTS = [rollout_of(prompt, said) for prompt, said in zip(PROMPTS, COMPLETIONS, strict=True)]


class Flat:
    """A policy that finds everything equally likely."""

    def log_probs(self, rows: Any) -> Any:
        return rows.like(TokenStats(torch.full(rows.padded().mask.shape, -1.0), None))

    def reference_log_probs(self, rows: Any) -> Any:
        return rows.like(TokenStats(torch.full(rows.padded().mask.shape, -2.0), None))


def by_length(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [
        {"reward": float(len(c.response_ids)), **({"long": 1.0} if len(c.response_ids) > 1 else {})}
        for c in rollouts
    ]


def samples():
    return collect(PROMPTS, ROLLOUTS, by_length, samples_per_prompt=2)


def test_rows_hold_prompt_and_response_and_the_mask_covers_the_response_targets() -> None:
    found = samples().padded()
    assert found.rows.tokens.tolist() == [
        [1, 2, 3, 0, 0, 0],
        [1, 2, 3, 4, 5, 6],
        [9, 0, 0, 0, 0, 0],
        [9, 8, 0, 0, 0, 0],
    ]
    assert found.rows.mask.int().tolist() == [
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
        [0] * 5,
        [1, 0, 0, 0, 0],
    ]


def test_log_probs_stand_at_the_column_before_their_token() -> None:
    logp = samples().padded().behaviour_logp
    assert logp[1].tolist() == pytest.approx([0, 0, -0.3, -0.4, -0.5])
    assert logp[3].tolist() == pytest.approx([-0.6, 0, 0, 0, 0])


def test_siblings_share_a_group_and_truncation_is_kept() -> None:
    found = samples()
    assert found.group.tolist() == [0, 0, 1, 1]
    assert found.truncated.tolist() == [False, True, True, False]
    assert found.reward.tolist() == [2, 3, 0, 1]
    assert set(found.reward_parts) == {"long"}
    assert found.reward_parts["long"].isnan().tolist() == [False, False, True, True], (
        "a part that wasn't asked for is no 0"
    )


def test_experience_spreads_the_group_advantage_over_the_response_only() -> None:
    made = ExperienceMaker(
        Flat(), AlgorithmConfig(advantage=GroupNorm(scale_by_std=False), kl=KLConfig(coef=0.1))
    ).make(samples())
    made = made.padded()
    assert made.advantage.tolist() == [
        [0, 0, -0.5, -0.5, 0],
        [0, 0, 0.5, 0.5, 0.5],
        [0] * 5,
        [0.5, 0, 0, 0, 0],
    ]
    assert made.reference_logp is not None
    assert made.reference_logp.unique().tolist() == [-2.0, 0.0]
    assert made.reference_logp[0].tolist() == [-2.0] * 4 + [0.0]
    assert ExperienceMaker(Flat()).make(samples()).reference_logp is None


def test_selected_rows_are_trimmed_to_the_longest_of_them() -> None:
    made = ExperienceMaker(Flat(), AlgorithmConfig(kl=KLConfig(coef=0.1))).make(samples())
    part = made.select(torch.tensor([3, 0])).padded()
    assert part.tokens.tolist() == [[9, 8, 0, 0, 0], [1, 2, 3, 0, 0]]
    assert part.mask.shape == part.old_logp.shape == part.advantage.shape == (2, 4)
    assert part.lengths.tolist() == [2, 5]
    nothing = made.select(torch.zeros(0, dtype=torch.int64))
    assert len(nothing) == len(nothing.padded()) == 0
    whole = made.padded().select(torch.tensor([3, 0]))
    assert torch.equal(whole.tokens, part.tokens)
    assert torch.equal(whole.advantage, part.advantage)
