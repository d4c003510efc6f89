import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftmega.algorithms.gae import BLOCK, discounted_returns, gae


def loop(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
    """Advantages as sums of TD errors, eq. 16 read literally: one double loop over the tokens of
    the mask, in float64.
    """
    found = torch.zeros_like(values, dtype=torch.float64)
    for row in range(len(values)):
        kept = [t for t in range(values.shape[1]) if mask[row, t]]
        v = [float(values[row, t]) for t in kept] + [0.0]
        errors = [float(rewards[row, t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(kept)]
        for i, t in enumerate(kept):
            found[row, t] = sum((gamma * lambd) ** k * error for k, error in enumerate(errors[i:]))
    return found


def drawn(batch: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    values, rewards = torch.randn(2, batch, width, generator=random, dtype=torch.float64)
    return values, rewards, torch.rand(batch, width, generator=random) < 0.6


@pytest.mark.parametrize(
    ("gamma", "lambd", "expected"), [(1.0, 0.95, [0.95, 1.0]), (0.99, 1.0, [0.99, 1.0])]
)
@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("left", [0, 3])
def test_a_reward_at_the_end_is_discounted_a_token_however_wide_the_row(
    gamma: float, lambd: float, expected: list[float], padding: int, left: int
) -> None:
    rewards = torch.tensor([[9.0] * left + [0.0, 1.0] + [7.0] * padding])
    values = torch.tensor([[9.0] * left + [0.0, 0.0] + [math.nan] * padding])
    mask = torch.tensor([[0] * left + [1, 1] + [0] * padding])
    advantages, returns = gae(values, rewards, mask, gamma, lambd)
    torch.testing.assert_close(
        advantages, torch.tensor([[0.0] * left + expected + [0.0] * padding])
    )
    torch.testing.assert_close(returns, advantages)  # where every value is 0


def test_the_first_advantage_is_the_published_closed_form() -> None:
    r, v, gamma, lambd = (0.3, -1.0, 2.0), (0.5, 0.25, -0.75), 0.9, 0.8
    advantages, returns = gae(
        torch.tensor([v]).double(), torch.tensor([r]).double(), torch.ones(1, 3), gamma, lambd
    )
    step = gamma * lambd
    first = (
        r[0]
        + step * r[1]
        + step**2 * r[2]
        + gamma * (1 - lambd) * v[1]
        + gamma**2 * lambd * (1 - lambd) * v[2]
    )
    assert returns[0, 0] == pytest.approx(first)
    assert advantages[0, 0] == pytest.approx(first - v[0])


def test_lambda_of_one_is_what_was_earned_minus_what_was_expected() -> None:
    values, rewards, _ = drawn(1, 6)
    advantages, returns = gae(values, rewards, torch.ones(1, 6, dtype=torch.bool), 0.9, 1.0)
    earned = [sum(0.9**k * float(rewards[0, t + k]) for k in range(6 - t)) for t in range(6)]
    torch.testing.assert_close(returns[0], torch.tensor(earned).double())
    torch.testing.assert_close(advantages, returns - values)


def test_lambda_of_nought_is_the_error_of_one_step() -> None:
    values, rewards, _ = drawn(1, 6)
    advantages, _ = gae(values, rewards, torch.ones(1, 6, dtype=torch.bool), 0.9, 0.0)
    later = torch.cat((values[:, 1:], torch.zeros(1, 1)), 1)
    torch.testing.assert_close(advantages, rewards + 0.9 * later - values)


def test_tokens_outside_the_mask_take_no_step_and_are_not_read() -> None:
    """A tool's answer between two turns: the same as the row without it."""
    values, rewards, _ = drawn(1, 4)
    whole = gae(values, rewards, torch.ones(1, 4), 0.9, 0.8)
    spread = torch.tensor([0, 1, 5, 6])
    wide_values, wide_rewards = torch.full((2, 1, 8), math.nan, dtype=torch.float64)
    wide_values[:, spread], wide_rewards[:, spread] = values, rewards
    mask = torch.zeros(1, 8, dtype=torch.bool)
    mask[:, spread] = True
    for found, expected in zip(gae(wide_values, wide_rewards, mask, 0.9, 0.8), whole, strict=True):
        torch.testing.assert_close(found[:, spread], expected)
        assert not found[~mask].any()


def test_a_row_and_a_batch_without_tokens_have_no_advantage() -> None:
    values, rewards, mask = drawn(2, 3)
    mask[0] = False
    assert not any(found[0].any() for found in gae(values, rewards, mask, 1.0, 1.0))
    assert all(found.shape == (0, 3) for found in gae(values[:0], rewards[:0], mask[:0], 1.0, 1.0))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
    st.sampled_from((bool, int)),
)
def test_equals_the_double_loop_whatever_the_holes(
    batch: int, width: int, gamma: float, lambd: float, seed: int, kind: type
) -> None:
    values, rewards, mask = drawn(batch, width, seed)
    advantages, returns = gae(
        values, rewards, mask.to(torch.bool if kind is bool else torch.int64), gamma, lambd
    )
    torch.testing.assert_close(advantages, loop(values, rewards, mask, gamma, lambd))
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("width", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_long_rows_equal_the_recurrence_token_by_token(width: int, decay: float) -> None:
    values, rewards, mask = drawn(3, width, seed=width)
    advantages, _ = gae(values, rewards, mask, 0.97, decay)
    returns = discounted_returns(rewards.float(), mask, decay)
    assert returns.dtype == torch.float32
    for row in range(3):
        value = advantage = earned = 0.0
        for t in reversed(range(width)):
            if not mask[row, t]:
                assert advantages[row, t] == returns[row, t] == 0
                continue
            error = float(rewards[row, t]) + 0.97 * value - float(values[row, t])
            advantage = error + 0.97 * decay * advantage
            earned = float(rewards[row, t].float()) + decay * earned
            value = float(values[row, t])
            assert float(advantages[row, t]) == pytest.approx(advantage, rel=1e-12, abs=1e-12)
            assert float(returns[row, t]) == pytest.approx(earned, rel=1e-6, abs=1e-6)
