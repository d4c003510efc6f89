"""What ExperienceMaker makes of scored answers, against loops over answers and tokens in float64
straight from the papers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.algorithms.kl import KLController
from rftmega.algorithms.shaping import Shaping
from rftmega.config import AlgorithmConfig, KLConfig, RewardConfig, RunConfig
from rftmega.config.options.algorithms import GAE, GDPO, Returns
from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Rows, Samples, TokenStats, TokenValues
from rftmega.trainer.experience import ExperienceMaker

# tokens of the prompt, and of prompt and answer together
PROMPTS, LENGTHS = [2, 1, 3, 2], [6, 4, 4, 7]
WIDTH = max(LENGTHS) - 1
GAMMA, LAM, COEF = 0.9, 0.7, 0.3


def numbers(seed: int) -> Tensor:
    return torch.randn(len(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(seed))


def of_rows(x: Tensor) -> Tensor:
    """0 in what no row has."""
    inside = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None] - 1
    return torch.where(inside, x, 0.0)


class Models:
    """Policy and critic that say fixed numbers, the same of padding as of answers."""

    def log_probs(self, rows: Any, *, temperature: float | None = None) -> Any:
        return rows.like(TokenStats(-numbers(0).abs(), None))

    def reference_log_probs(self, rows: Any) -> Any:
        return rows.like(TokenStats(-numbers(1).abs(), None))

    def values(self, rows: Any) -> Any:
        return rows.like(TokenValues(numbers(2))).value


def samples() -> Samples[Ragged]:
    rows = Rows.of_completions(
        torch.zeros(len(LENGTHS), WIDTH + 1, dtype=torch.int64),
        torch.tensor(PROMPTS),
        torch.tensor(LENGTHS),
    )
    truncated = torch.tensor([False, True, False, False])
    reward = torch.tensor([1.0, -0.5, 0.25, 2.0])
    prompts = [Prompt((0,) * length) for length in PROMPTS]
    rows = rows.ragged()
    logp = rows.mask.with_values(torch.zeros(len(rows.mask.flat)))
    return Samples(prompts, rows, logp, reward, torch.arange(4) // 2, truncated, {})


ESTIMATORS: dict[str, Any] = {"gae": GAE(gamma=GAMMA, lam=LAM), "reinforce": Returns(gamma=GAMMA)}


def made(
    advantage: str, kl: KLConfig | None = None, shape: Shaping | None = None, **settings: Any
) -> Any:
    models = Models()
    critic = models if advantage == "gae" else None
    chosen = AlgorithmConfig(advantage=ESTIMATORS[advantage], kl=kl or KLConfig(), **settings)
    return ExperienceMaker(models, chosen, critic=critic, shape=shape).make(samples()).padded()


def completions() -> Iterator[tuple[int, list[int]]]:
    """Each row, and the columns of its answer's tokens."""
    for b, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        yield b, list(range(prompt - 1, length - 1))


def penalties(b: int, columns: list[int], estimator: str) -> list[float]:
    """COEF x KL of each token: k1 is log p - log p_reference, k2 half its square."""
    found = []
    for t in columns:
        delta = float(-numbers(0).abs()[b, t]) - float(-numbers(1).abs()[b, t])
        found.append(COEF * (delta if estimator == "k1" else delta**2 / 2))
    return found


def rewards_of(b: int, columns: list[int], estimator: str | None) -> list[float]:
    """The answer's reward at its last token, minus each token's penalty."""
    rewards = [0.0] * len(columns)
    rewards[-1] = float(samples().reward[b])
    if estimator is None:
        return rewards
    return [
        reward - penalty
        for reward, penalty in zip(rewards, penalties(b, columns, estimator), strict=True)
    ]


def gae_by_hand(rewards: list[float], values: list[float]) -> list[float]:
    """arXiv:1506.02438, eq. 16, as the sum that it is."""
    found = []
    for t in range(len(rewards)):
        total = 0.0
        for later in range(t, len(rewards)):
            following = values[later + 1] if later + 1 < len(values) else 0.0
            total += (GAMMA * LAM) ** (later - t) * (
                rewards[later] + GAMMA * following - values[later]
            )
        found.append(total)
    return found


def assert_tokens(found: Tensor, wanted: dict[int, list[float]]) -> None:
    """`wanted`: of each row, the answer's tokens; everything else is 0."""
    for b, columns in completions():
        assert found[b, columns].tolist() == pytest.approx(wanted[b], abs=1e-5)
        others = [t for t in range(WIDTH) if t not in columns]
        assert found[b, others].tolist() == [0.0] * len(others)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_gae_takes_the_critics_values_and_the_kl_off_each_tokens_reward(estimator: str) -> None:
    found = made(advantage="gae", kl=KLConfig(placement="reward", estimator=estimator, coef=COEF))
    wanted = {}
    for b, columns in completions():
        values = [float(numbers(2)[b, t]) for t in columns]
        wanted[b] = gae_by_hand(rewards_of(b, columns, estimator), values)
    assert_tokens(found.advantage, wanted)
    for b, columns in completions():
        values = [float(numbers(2)[b, t]) for t in columns]
        returns = [advantage + value for advantage, value in zip(wanted[b], values, strict=True)]
        assert found.returns[b, columns].tolist() == pytest.approx(returns, abs=1e-5), (
            "what the critic should have said"
        )
    assert torch.equal(found.old_value, of_rows(numbers(2)))


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_returns_discount_rewards_that_the_kl_was_taken_off(estimator: str) -> None:
    found = made(
        advantage="reinforce", kl=KLConfig(placement="reward", estimator=estimator, coef=COEF)
    )
    wanted = {}
    for b, columns in completions():
        rewards = rewards_of(b, columns, estimator)
        wanted[b] = [
            sum(GAMMA ** (k - t) * rewards[k] for k in range(t, len(rewards)))
            for t in range(len(rewards))
        ]
    assert_tokens(found.advantage, wanted)


@pytest.mark.parametrize("advantage", ["gae", "reinforce"])
def test_a_kl_in_the_loss_is_not_in_the_reward_as_well(advantage: str) -> None:
    found = made(advantage=advantage, kl=KLConfig(coef=COEF))
    assert torch.equal(found.reference_logp, of_rows(-numbers(1).abs())), "the loss needs it"
    wanted = {}
    for b, columns in completions():
        rewards = rewards_of(b, columns, None)
        if advantage == "gae":
            wanted[b] = gae_by_hand(rewards, [float(numbers(2)[b, t]) for t in columns])
        else:
            wanted[b] = [GAMMA ** (len(rewards) - 1 - t) * rewards[-1] for t in range(len(rewards))]
    assert_tokens(found.advantage, wanted)


def test_the_loss_leaves_a_kl_in_the_reward_alone() -> None:
    """As `Algorithm` builds both: where the KL is in the reward, the loss has none."""
    from rftmega.trainer import Algorithm

    for place, in_reward in (("reward", True), ("loss", False)):
        config = RunConfig(
            algorithm=AlgorithmConfig(
                advantage=Returns(), kl=KLConfig(placement=place, coef=COEF, estimator="k2")
            )
        )
        algorithm = Algorithm(config)
        maker = algorithm.maker(Models())
        assert (maker.kl_in_reward is not None) == in_reward
        experience = maker.make(samples()).padded()
        logp = -numbers(0).abs()
        with_kl = algorithm.policy_loss()(TokenStats(logp, None), experience)
        without = Algorithm(RunConfig(algorithm=AlgorithmConfig(advantage=Returns()))).policy_loss()
        plain = without(TokenStats(logp, None), experience)
        same = torch.equal(with_kl.value * with_kl.weight, plain.value * plain.weight)
        assert same == in_reward


def test_the_overlong_penalty_counts_answers_without_their_prompts() -> None:
    """Answers of 4, 3, 1 and 5 tokens; from 3 on it falls in a line to -2 at 5."""
    found = made(advantage="reinforce", shape=Shaping(longest=5, buffer=2, factor=2.0))
    by_length = {4: -1.0, 3: 0.0, 1: 0.0, 5: -2.0}
    for b, columns in completions():
        last = float(samples().reward[b]) + by_length[len(columns)]
        assert float(found.advantage[b, columns[-1]]) == pytest.approx(last)


def test_gdpo_weighs_the_components_as_the_reward_of_each_task_type_does() -> None:
    """exact_match has no weight, near counts in the task type b alone, and the environment's own
    reward counts twice; so that the advantages are those of the components in these weights.
    """
    config = RunConfig(
        algorithm=AlgorithmConfig(advantage=GDPO()),
        reward=RewardConfig(
            recipe={"a": {"math": 1.0}, "b": {"math": 1.0, "near": 3.0}}, environment={"bonus": 2.0}
        ),
    )
    given = samples()
    prompts = [replace(each, kind="aabb"[row]) for row, each in enumerate(given.prompts)]
    parts = {
        "exact_match": torch.tensor([1.0, 0.0, 0.0, 1.0]),
        "math": torch.tensor([1.0, 0.0, 0.0, 1.0]),
        "near": torch.tensor([torch.nan, torch.nan, 0.8, 0.3]),
        "bonus": torch.tensor([0.1, 0.5, 0.2, 0.9]),
        "math_undecided": torch.tensor([0.0, 1.0, 0.0, 1.0]),
    }
    from rftmega.trainer import Algorithm

    maker = Algorithm(config).maker(Models())
    found = maker.make(replace(given, prompts=prompts, reward_parts=parts)).padded()
    half = 0.5**0.5  # of two that differ: the advantage is plus or minus this
    sums = [half - 2 * half, 2 * half - half, 3 * half - half - 2 * half, 3 * half - 3 * half]
    mean = sum(sums) / 4
    deviation = (sum((x - mean) ** 2 for x in sums) / 4) ** 0.5
    for b, columns in completions():
        wanted = (sums[b] - mean) / deviation
        assert float(found.advantage[b, columns[0]]) == pytest.approx(wanted, abs=1e-4)


def test_truncated_answers_that_are_left_out_are_not_whitened_with_the_others() -> None:
    found = made(advantage="reinforce", whiten=True, drop_truncated=True)
    assert found.mask.any(-1).tolist() == [True, False, True, True]
    plain = made(advantage="reinforce").advantage
    kept = [float(plain[b, t]) for b, columns in completions() for t in columns if b != 1]
    mean = sum(kept) / len(kept)
    deviation = (sum((x - mean) ** 2 for x in kept) / len(kept)) ** 0.5
    whitened = [
        float(found.advantage[b, t]) for b, columns in completions() for t in columns if b != 1
    ]
    assert whitened == pytest.approx([(x - mean) / deviation for x in kept], abs=1e-4)
    assert found.advantage[1].tolist() == [0.0] * WIDTH


def test_a_running_weight_of_the_kl_is_the_one_of_now() -> None:
    controller = KLController(COEF)
    models = Models()
    chosen = AlgorithmConfig(
        advantage=Returns(gamma=GAMMA), kl=KLConfig(placement="reward", estimator="k1", coef=COEF)
    )
    maker = ExperienceMaker(models, chosen, kl_weight=controller)
    before = maker.make(samples()).padded().advantage
    controller.value = 0.0
    after = maker.make(samples()).padded().advantage
    assert torch.equal(after, made(advantage="reinforce").advantage)
    assert not torch.equal(before, after)
