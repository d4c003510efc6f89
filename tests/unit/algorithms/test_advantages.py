import itertools
import math
from typing import Any

import pytest
import torch

from rftmega.algorithms.advantages import (
    RewardComponent,
    Scored,
    advantages,
    group_normalised,
    leave_one_out,
    token_rewards,
    whitened,
)
from rftmega.algorithms.gae import discounted_returns
from rftmega.algorithms.groups import varied
from rftmega.config.options.algorithms import (
    GAE,
    GDPO,
    GroupNorm,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    Returns,
)
from tests.columns import ragged

ESTIMATORS = {
    part.type: part
    for part in (GroupNorm(), LeaveOneOut(), Returns(gamma=0.9), GAE(gamma=0.9, lam=0.8))
}


def by_hand(rewards: list[float], groups: list[int]) -> list[float]:
    """A double loop in float64, straight from the paper."""
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(siblings) / len(siblings)
        if len(set(siblings)) == 1:
            found.append(0.0)
            continue
        variance = sum((r - mean) ** 2 for r in siblings) / (len(siblings) - 1)
        found.append((reward - mean) / (variance**0.5 + 1e-6))
    return found


def test_it_equals_the_formula_on_ragged_interleaved_groups() -> None:
    rewards, groups = [1.0, 0.0, 0.25, 1.0, -2.0, 0.5, 0.5], [3, 0, 3, 0, 0, 3, 9]
    found = group_normalised(torch.tensor(rewards), torch.tensor(groups))
    torch.testing.assert_close(found, torch.tensor(by_hand(rewards, groups)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("reward", "size"), list(itertools.product([0.1, 0.3, 0.9, 1e9], [2, 3, 7]))
)
def test_a_group_that_agrees_teaches_exactly_nothing(reward: float, size: int) -> None:
    found = group_normalised(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64))
    assert found.tolist() == [0.0] * size


def test_a_group_of_one_teaches_nothing() -> None:
    assert group_normalised(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]


def test_without_std_it_is_the_distance_to_the_mean() -> None:
    found = group_normalised(
        torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), scale_by_std=False
    )
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_leaving_one_out_compares_with_the_mean_of_the_others() -> None:
    reward, group = (
        torch.tensor([1.0, 0.0, 0.25, 5.0, 0.1, 0.1, 0.1]),
        torch.tensor([4, 4, 4, 9, 1, 1, 1]),
    )
    wanted = [1 - 0.125, -0.625, 0.25 - 0.5, 0.0, 0.0, 0.0, 0.0]
    assert leave_one_out(reward, group).tolist() == pytest.approx(wanted)
    assert leave_one_out(reward, group)[3:].tolist() == [0.0] * 4, (
        "a group of one, and one that agrees, teach nothing at all"
    )


def of_completions(
    rewards: list[float],
    groups: list[int],
    options: Any,
    parts: dict[str, RewardComponent] | None = None,
) -> list[float]:
    """The advantages of completions of one token each."""
    mask = ragged(torch.ones(len(rewards), 1, dtype=torch.bool))
    scored = Scored(torch.tensor(rewards), torch.tensor(groups), mask, None, None, parts=parts)
    return advantages(scored, options).flat.tolist()


def test_maxrl_divides_by_the_mean_and_a_group_without_reward_teaches_nothing() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, -1.0, -3.0]
    groups = [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    wanted = [3.0, -1.0, -1.0, -1.0, 0.5, 0.5, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert of_completions(rewards, groups, MaxRL()) == pytest.approx(wanted)


def best_of(rewards: list[float], k: int) -> list[float]:
    """By every subset of k."""
    k = min(k, len(rewards))
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    mean = sum(best) / len(best)
    deviation = (sum((x - mean) ** 2 for x in best) / len(best)) ** 0.5
    found = []
    for i in range(len(rewards)):
        own = [x for x, subset in zip(best, subsets, strict=True) if i in subset]
        found.append((sum(own) / len(own) - mean) / deviation if deviation else 0.0)
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_compares_the_best_of_all_subsets(k: int) -> None:
    first, second, third = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.3, 0.1, 0.3, -2.0, 0.7], [1.0, 0.0]
    wanted = [*best_of(first, k), *best_of(second, k), *best_of(third, k)]
    groups = [4] * len(first) + [0] * len(second) + [9] * len(third)
    found = of_completions([*first, *second, *third], groups, PassAtK(k=k))
    assert found == pytest.approx(wanted, abs=1e-6)


def test_pass_at_k_of_rewards_of_0_and_1_is_the_papers_formula() -> None:
    size, wrong, k = 8, 6, 4
    mean = 1 - math.comb(wrong, k) / math.comb(size, k)
    deviation = (mean * (1 - mean)) ** 0.5
    missed = math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    found = of_completions([1.0] * 2 + [0.0] * 6, [0] * 8, PassAtK(k=k))
    wanted = [(1 - mean) / deviation] * 2 + [(1 - mean - missed) / deviation] * 6
    assert found == pytest.approx(wanted)


def test_gdpo_normalises_each_component_then_sums_and_whitens() -> None:
    nan = math.nan
    scores = {"right": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], "short": [0.2, 0.9, nan, nan, 0.4, 0.1]}
    weights = {"right": [1.0] * 6, "short": [0.5, 0.5, 0.5, 2.0, 2.0, 2.0]}
    groups = [7, 7, 7, 1, 1, 1]
    total = [0.0] * 6
    for name, own in scores.items():
        there = [i for i, score in enumerate(own) if not math.isnan(score)]
        normal = by_hand([own[i] for i in there], [groups[i] for i in there])
        for i, x in zip(there, normal, strict=True):
            total[i] += weights[name][i] * x
    mean = sum(total) / 6
    deviation = (sum((x - mean) ** 2 for x in total) / 6) ** 0.5
    parts = {
        name: RewardComponent(torch.tensor(scores[name]), torch.tensor(weights[name]))
        for name in scores
    }
    found = of_completions([9.0] * 6, groups, GDPO(), parts)
    assert found == pytest.approx([(x - mean) / deviation for x in total], abs=1e-5)


MASK = torch.tensor(
    [[True, False, True, True, False], [False, True, False, False, False], [False] * 5]
)


def test_an_answers_reward_is_at_its_last_token_once() -> None:
    reward, penalty = torch.tensor([1.0, 2.0, 3.0]), torch.full((3, 5), 0.1)
    assert token_rewards(reward, MASK).tolist() == [[0, 0, 0, 1, 0], [0, 2, 0, 0, 0], [0] * 5]
    found = token_rewards(reward, MASK, torch.where(MASK, penalty, torch.nan))
    assert found.sum(-1).tolist() == pytest.approx([1 - 0.3, 2 - 0.1, 0.0])


def test_returns_are_discounted_by_tokens_and_step_over_holes() -> None:
    reward = torch.tensor([[1.0, 7.0, 2.0, 4.0, 9.0], [9.0, 3.0, 9.0, 9.0, 9.0], [9.0] * 5])
    found = discounted_returns(reward, MASK, 0.5)
    assert found.tolist() == [
        [1 + 0.5 * (2 + 0.5 * 4), 0, 2 + 0.5 * 4, 4, 0],
        [0, 3, 0, 0, 0],
        [0] * 5,
    ]


def test_whitening_is_over_the_tokens_of_the_mask_alone() -> None:
    torch.manual_seed(0)
    x = torch.where(MASK, torch.randn(3, 5) * 4 + 7, torch.inf)
    found = whitened(x, MASK)
    assert found[MASK].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert found[MASK].var(correction=0).item() == pytest.approx(1.0, rel=1e-5)
    assert found[~MASK].abs().sum() == 0
    assert whitened(torch.full((3, 5), 0.1), MASK).abs().sum() == 0
    assert whitened(x, torch.zeros_like(MASK)).abs().sum() == 0


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_no_estimator_says_anything_outside_the_mask_or_depends_on_the_order_of_rows(
    name: str,
) -> None:
    torch.manual_seed(1)
    mask = torch.rand(8, 6) < 0.6
    reward, group = torch.randn(8), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    penalty = torch.where(mask, torch.rand(8, 6), torch.nan)
    value = torch.where(mask, torch.randn(8, 6), torch.nan)

    def found_of(rows: torch.Tensor) -> torch.Tensor:
        columns = [ragged(column[rows]) for column in (mask, value, penalty)]
        return advantages(Scored(reward[rows], group[rows], *columns), ESTIMATORS[name]).padded()

    found = found_of(torch.arange(8))
    assert found.isfinite().all()
    assert found[~mask].abs().sum() == 0
    order = torch.randperm(8)
    torch.testing.assert_close(found_of(order), found[order])


def test_reinforce_with_a_baseline_is_whitened_over_tokens_not_answers() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    scored = Scored(torch.tensor([1.0, 0.0]), torch.zeros(2), ragged(mask), None, None)
    found = whitened(advantages(scored, GroupNorm(scale_by_std=False)).padded(), mask)
    kept = torch.tensor([0.5, 0.5, 0.5, -0.5])
    wanted = (kept - kept.mean()) / kept.std(correction=0)
    torch.testing.assert_close(found[mask], wanted)


def test_only_groups_whose_answers_differ_are_varied_whatever_the_order() -> None:
    score = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 1.0, 0.3])
    group = torch.tensor([7, 2, 7, 2, 7, 5, 9])
    assert varied(score, group).tolist() == [False, True, False, True, False, False, False]


def test_the_kl_of_an_answer_is_taken_off_its_reward_before_the_others_are_compared() -> None:
    """RLOO with an answer as one action: R = reward - sum of the tokens' penalties, then R minus
    the mean of the others' R.
    """
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    penalty = torch.tensor([[0.1, 0.2, 9.0], [0.5, 9.0, float("nan")], [0.0, -0.1, 0.3]])
    reward, group = torch.tensor([1.0, 0.0, 2.0]), torch.zeros(3, dtype=torch.int64)
    scored = Scored(reward, group, ragged(mask), None, ragged(penalty))
    found = advantages(scored, LeaveOneOut()).padded()
    whole = [1.0 - 0.3, 0.0 - 0.5, 2.0 - 0.2]
    for b, own in enumerate(whole):
        others = [x for i, x in enumerate(whole) if i != b]
        wanted = own - sum(others) / 2
        assert found[b].tolist() == pytest.approx(
            [wanted if kept else 0.0 for kept in mask[b].tolist()]
        )


def test_groups_that_differ_make_up_for_those_that_agree() -> None:
    """Four groups of two, one of which differs: its advantages are those without, times 4 or the
    largest weight.
    """
    reward = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0])
    group, mask = torch.arange(8) // 2, torch.ones(8, 1, dtype=torch.bool)

    def found(most: float) -> list[float]:
        chosen = GroupNorm(scale_by_std=False, clip_filter_weight=most)
        scored = Scored(reward, group, ragged(mask), None, None)
        return advantages(scored, chosen).flat.tolist()

    assert found(0.0) == [0, 0, -0.5, 0.5, 0, 0, 0, 0]
    assert found(3.0) == [0, 0, -1.5, 1.5, 0, 0, 0, 0]
    assert found(9.0) == [0, 0, -2.0, 2.0, 0, 0, 0, 0]
